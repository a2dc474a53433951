// Which communicators may have a table at all. Asked first and once for each of them, by every
// mode: what cannot be told apart, or runs on an NCCL that nobody has read, keeps NCCL's own
// choice.
//
//   NCCL_COMM_ID  where set, all communicators have one id: all abstain.
#pragma once

#include <cstddef>
#include <cstdint>

#include "nccl/tuner_abi.h"

namespace dynamiccl {

/// What NCCL tells a tuner's `init`.
struct Communicator {
  std::size_t num_ranks;
  std::size_t num_nodes;
  ncclDebugLogger_t logger;                         // may be null
  const ncclNvlDomainInfo_v5_t* domains = nullptr;  // null: not told
  std::uint64_t comm_id = 0;                        // 0: not told
};

struct Checked {
  int nccl_version;               // of the NCCL that calls, as ncclGetVersion says; 0: unknown
  const char* reason_to_abstain;  // the same on all its ranks; null: none
  bool ids_repeat;                // a reason too, but one that its other ranks may not know
};

inline constexpr char kIdsRepeat[] = "a communicator was shrunk before: ids may repeat";

/// Whether a new communicator can be told from all others. Its id is remembered, so this must be
/// called for each communicator of the process, those that abstain for other reasons included.
Checked check_communicator(const Communicator& communicator) noexcept;

/// Remembers the id of a communicator. Returns whether ids may repeat from now on in this process's
/// communicators.
///
/// All shrinks of one parent have one id, and so have their children (2.30.7
/// `init.cc:1875-1880,3143-3152`). A first shrink is known by its parent's id. What is made of it
/// later cannot be told from a communicator of ncclCommInitRank: its id is a hash, of a colour
/// among others. So after a first shrink all later communicators of the process abstain. Ranks that
/// join by ncclCommGrow have seen no shrink: in mode table the others vote the problem; mode
/// adaptive decides nothing without the others.
bool note_id(std::uint64_t id) noexcept;

}  // namespace dynamiccl
