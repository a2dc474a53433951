// NCCL's `init` and `getCollInfo`, for this library and for vendor/: one agreement in `init`, then
// table look-ups.
//
// Every function returns success, since any other value fails a collective or a communicator. The
// exception is an `init` whose coordinator was lost after this rank had confirmed (voter.h): some
// ranks may have the table, and this one cannot know.
//
//   DYNAMICCL_ONE_WORLD  1: before NCCL 2.27, a promise that only one communicator of all ranks is
//                        made at a time; without it all abstain there.
//   NCCL_COMM_ID         where set, all communicators have one id: all abstain.
#pragma once

#include <cstddef>

#include "choice.h"
#include "nccl/tuner_abi.h"
#include "table.h"
#include "tuner/tables.h"
#include "tuner/voter.h"

namespace dynamiccl {

/// Agrees with the other ranks, once. `*table` is null where NCCL's own choice stands (a log line
/// says why); a table stays valid until the process ends (tables.h). `domains` may be null.
/// `asked_first` names the vendor's tuner that is called before ours, equal on all ranks, or is
/// "none".
ncclResult_t init_communicator(std::size_t num_ranks, std::size_t num_nodes, std::uint64_t comm_id,
                               const ncclNvlDomainInfo_v5_t* domains, ncclDebugLogger_t logger,
                               const char* asked_first, const DecisionTable** table) noexcept;

/// The id of the communicator whose tuner is created next on this thread, as NCCL 2.27 passed it to
/// this library's profiler (comm_id_profiler.cpp); 0: not known, or of another communicator.
std::uint64_t take_comm_id(std::size_t num_ranks, std::size_t num_nodes) noexcept;

/// Sets the cost of the chosen cell to 0.0 and the number of channels; or changes nothing.
inline void answer(const DecisionTable& table, int collective, std::size_t size_bytes,
                   const CostTable& costs, int* num_channels) noexcept {
  // RCCL has an eighth algorithm; NCCL before 2.23 had six.
  const bool is_nccl = is_sound(costs) && costs.num_algorithms <= kNumAlgorithms;
  const Entry* entry = is_nccl ? lookup(table, collective, size_bytes) : nullptr;
  if (entry != nullptr) choose(*entry, table.num_nodes, costs, num_channels);
}

/// Remembers the id of a communicator. Returns whether ids may repeat from now on in this process's
/// communicators.
///
/// All shrinks of one parent have one id, and so have their children (2.30.7
/// `init.cc:1875-1880,3143-3152`). A first shrink is known by its parent's id. What is made of it
/// later cannot be told from a communicator of ncclCommInitRank: its id is a hash, of a colour
/// among others. So after a first shrink all later communicators of the process object, and the
/// coordinator, once it has heard of one, abstains on all later ones of the job: ranks that join by
/// ncclCommGrow have seen no shrink.
bool note_id(std::uint64_t id) noexcept;

/// NCCL's hash for the id of a shrunk communicator (2.30.7 `bitops.h:502`).
std::uint64_t id_of_shrunk(std::uint64_t parent_id) noexcept;

void say(ncclDebugLogger_t logger, ncclDebugLogLevel level, std::size_t num_ranks,
         std::size_t num_nodes, const char* text) noexcept;

}  // namespace dynamiccl
