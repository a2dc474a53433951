// A communicator's vote in `init`, for the libraries of tables (exports.cpp, ../vendor) and of mode
// adaptive. Everything returns success, since an error fails a communicator or a collective, but an
// `init` that heard nothing for the answer limit after it had confirmed (agree/ballot.h).
//
// NCCL calls `init` on every rank of every new communicator after all have met in the bootstrap,
// without a lock, each creation of a group on a thread of its own (2.30.7 `src/group.cc:484`): up
// to 2.27 at the end of the creation (2.27.7 `src/init.cc:1452`), from 2.28 on before the cost
// model is made (2.28.9 line 1354, 2.29.7 1447, 2.30.7 1641). An error fails this rank's creation
// and aborts the others of its group (2.27.7 `src/group.cc:416`); the other ranks have the
// communicator and wait in their first collective, from 2.28 on those of its node in a barrier
// (2.30.7 `src/init.cc:1694`). `finalize` may follow with an empty context.
// What dynamiccl-run has prepared for this process is in the environment (docs/environment.md).
#pragma once

#include "agree/caller.h"
#include "nccl/tuner_shell.h"

namespace dynamiccl {

struct Joining {
  const Communicator& communicator;
  const Checked& checked;
  /// The vendor's tuner that is called before ours, equal on all ranks.
  const char* asked_first = "none";
  /// Mode adaptive, whose ranks meet at the arbiter, where the leader is.
  bool has_stops = false;
  /// Why this rank cannot use a table; more may be found.
  char problem[320] = "";
  Exchange exchange = {};

  // What the vote needs and leaves.
  Vote vote = {};
  Arbiter arbiter = {};
  bool by_word = false;                  // else by the arbiter
  const DecisionTable* table = nullptr;  // valid until the process ends
  Verdict verdict = Verdict::kAbstain;
};

/// Agrees with the other ranks, once, and says in NCCL's log how that ended. Returns what `init`
/// does; the table is in force with Verdict::kTable alone.
ncclResult_t agree_in_init(Joining* joining) noexcept;

/// The id of this communicator, whose tuner is created next on this thread, as NCCL 2.27 passed it
/// to this library's profiler (comm_id_profiler.cpp); 0: not known.
std::uint64_t take_comm_id(const Communicator& communicator) noexcept;

/// The same for a library of tables: `*table` is null where NCCL's own choice stands.
inline ncclResult_t init_communicator(Communicator communicator, const char* asked_first,
                                      const DecisionTable** table) noexcept {
  if (communicator.abi_version < 5) communicator.comm_id = take_comm_id(communicator);
  const Checked checked = check_communicator(communicator);  // whatever follows
  Joining joining = {communicator, checked, asked_first};
  const ncclResult_t result = agree_in_init(&joining);
  *table = joining.verdict == Verdict::kTable ? joining.table : nullptr;
  return result;
}

/// The entry for what NCCL asks; null: nothing is to be touched.
inline const Entry* entry_for(const DecisionTable& table, const Question& question) noexcept {
  // RCCL has an eighth algorithm.
  const bool is_nccl = is_sound(question.costs) && question.costs.num_algorithms <= kNumAlgorithms;
  if (!is_nccl || !question.is_about_a_cell()) return nullptr;
  return lookup(table, question.collective, question.size_bytes);
}

/// Sets the cost of the chosen cell to 0.0 and the number of channels; or changes nothing.
inline void answer(const DecisionTable& table, const Question& question) noexcept {
  const Entry* entry = entry_for(table, question);
  if (entry != nullptr) choose(*entry, table.num_nodes, question.costs, question.num_channels);
}

}  // namespace dynamiccl
