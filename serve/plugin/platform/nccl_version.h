// Which NCCL this process has loaded, without a symbol newer than glibc 2.28.
#pragma once

namespace dynamiccl {

/// What ncclGetVersion of the loaded NCCL says, 22809 for 2.28.9; 0 where none is loaded.
int loaded_nccl_version() noexcept;

/// The same of the NCCL whose function (its logger) this is: a process may have loaded two. Of the
/// first that is loaded where the function's own library has no ncclGetVersion.
int nccl_version_of(void (*function)()) noexcept;

/// The path of the library that a function lies in; empty when unknown.
const char* library_of(void (*function)()) noexcept;

}  // namespace dynamiccl
