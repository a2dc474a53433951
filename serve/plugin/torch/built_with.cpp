// Which torch the runtime was compiled against; a file of its own, so that tests can pretend.
#include "torch/built_with.h"

#include <torch/version.h>

namespace dynamiccl {

const char* torch_version_at_build() { return TORCH_VERSION; }

const char* torch_revision_at_build() { return DYNAMICCL_TORCH_REVISION; }

}  // namespace dynamiccl
