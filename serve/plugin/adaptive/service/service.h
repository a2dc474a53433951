// The background thread of this process: connections, the agreements of all communicators, and
// polling (kill file, new artifact, counters).
//
// It starts with the first communicator that joins, and never calls CUDA or NCCL.
#pragma once

#include "adaptive/agreement/agreement.h"

namespace dynamiccl {

/// Add the agreement to the service, which holds a reference. False, with a reason, when it cannot
/// join: no address, no key, no thread.
bool join_service(Agreement* agreement, const char** reason) noexcept;

/// The communicator has ended. Returns at once.
void leave_service(Agreement* agreement) noexcept;

/// Wake the service.
void wake_service() noexcept;

}  // namespace dynamiccl
