// NCCL's `init` and `getCollInfo`, for this library and for vendor/: one agreement in `init`, then
// table look-ups.
//
// Every function returns success, since any other value fails a collective or a communicator. The
// exception is an `init` that heard nothing for the answer limit after it had confirmed
// (agree/ballot.h): other ranks may have the table, and this one cannot know.
#pragma once

#include "choice.h"
#include "tuner/prepared.h"

namespace dynamiccl {

/// Agrees with the other ranks, once. `*table` is null where NCCL's own choice stands (a log line
/// says why); a table stays valid until the process ends. `asked_first` names the vendor's tuner
/// that is called before ours, equal on all ranks, or is "none".
ncclResult_t init_communicator(const Communicator& communicator, const char* asked_first,
                               const DecisionTable** table) noexcept;

/// The id of this communicator, whose tuner is created next on this thread, as NCCL 2.27 passed it
/// to this library's profiler (comm_id_profiler.cpp); 0: not known.
std::uint64_t take_comm_id(const Communicator& communicator) noexcept;

/// Sets the cost of the chosen cell to 0.0 and the number of channels; or changes nothing.
inline void answer(const DecisionTable& table, int collective, std::size_t size_bytes,
                   const CostTable& costs, int* num_channels) noexcept {
  // RCCL has an eighth algorithm; NCCL before 2.23 had six.
  const bool is_nccl = is_sound(costs) && costs.num_algorithms <= kNumAlgorithms;
  const Entry* entry = is_nccl ? lookup(table, collective, size_bytes) : nullptr;
  if (entry != nullptr) choose(*entry, table.num_nodes, costs, num_channels);
}

// ---- what mode adaptive takes of it ----

inline constexpr std::size_t kReasonBytes = 400;

/// The vote of `init`, by word or arbiter; `reason` is why there is no table.
Verdict vote_in_init(const Meeting& meeting, const Vote& vote, char (&reason)[kReasonBytes],
                     Exchange* exchange) noexcept;

/// Says how the vote ended, and returns what `init` does.
ncclResult_t tell(const Communicator& communicator, Verdict verdict, const char* reason) noexcept;

}  // namespace dynamiccl
