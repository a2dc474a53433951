// Which torch the runtime was compiled against.
#pragma once

namespace dynamiccl {

/// As in torch/version.h, e.g. `2.13.0`; builds of one release, for CPU or GPU, share it.
const char* torch_version_at_build();

/// `git_version` of that torch's version.py; empty for a torch that has none.
const char* torch_revision_at_build();

}  // namespace dynamiccl
