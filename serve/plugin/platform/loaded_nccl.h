// Which NCCL this process has loaded, without a symbol newer than glibc 2.28.
#pragma once

namespace dynamiccl {

/// What ncclGetVersion of the loaded NCCL says, 22809 for 2.28.9; 0 where none is loaded.
int loaded_nccl_version() noexcept;

}  // namespace dynamiccl
