// The one background thread of this process: it keeps the connections, the agreements of all
// communicators, and what is looked at from time to time (kill file, new artifact, counters).
//
// It starts with the first communicator that takes part and never touches CUDA or NCCL.
#pragma once

#include "adaptive/agreement/agreement.h"

namespace dynamiccl {

/// Take the agreement into the service, which holds it as well. False, with a reason, when it can
/// take no part: no address, no key, no thread.
bool join_service(Agreement* agreement, const char** reason) noexcept;

/// The communicator is gone. Returns at once.
void leave_service(Agreement* agreement) noexcept;

/// Something is waiting for the service.
void wake_service() noexcept;

}  // namespace dynamiccl
