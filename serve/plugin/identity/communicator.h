// Which communicators may have a table at all. Asked first and once for each of them, by every
// mode: what cannot be told apart, or runs on an NCCL that nobody has read, keeps NCCL's own
// choice.
#pragma once

#include "nccl/tuner_abi.h"

namespace dynamiccl {

/// What NCCL tells a tuner's `init`.
struct Communicator {
  std::size_t num_ranks;
  std::size_t num_nodes;
  ncclDebugLogger_t logger;                   // may be null
  ncclNvlDomainInfo_v5_t* domains = nullptr;  // null: not told
  std::uint64_t comm_id = 0;                  // 0: not told
};

struct Checked {
  int nccl_version;               // of the NCCL that calls, as ncclGetVersion says; 0: unknown
  const char* reason_to_abstain;  // the same on all its ranks; null: none
  bool ids_repeat;                // a reason too (ids.h), but one that its other ranks may not know
};

/// Whether a new communicator can be told from all others. Its id is remembered, so this must be
/// called for each communicator of the process, those that abstain for other reasons included.
Checked check_communicator(const Communicator& communicator) noexcept;

/// The release of the NCCL that contains this logger, such as 22809 for 2.28.9, since a process may
/// have loaded two; else of any that is not hidden (RTLD_LOCAL); 0 where there is none. `library`:
/// its path, or "".
int nccl_version_of(ncclDebugLogger_t logger, const char** library) noexcept;

/// A line in NCCL's log.
__attribute__((format(printf, 3, 4))) void say(const Communicator& communicator,
                                               ncclDebugLogLevel level, const char* format,
                                               ...) noexcept;

}  // namespace dynamiccl
