// NCCL's `init` and `getCollInfo`, for this library and for vendor/: one agreement in `init`, then
// table look-ups.
//
// Every function returns success, since any other value fails a collective or a communicator. The
// exception is an `init` that heard nothing for the answer limit after it had confirmed
// (agree/ballot.h): other ranks may have the table, and this one cannot know.
//
// NCCL calls `init` on every rank of every new communicator after all have met in the bootstrap,
// without a lock, each creation of a group on a thread of its own (2.30.7 `src/group.cc:484`): up
// to 2.27 at the end of the creation (2.27.7 `src/init.cc:1452`), from 2.28 on before the cost
// model is made (2.28.9 line 1354, 2.29.7 1447, 2.30.7 1641). An error fails this rank's creation
// and aborts the others of its group (2.27.7 `src/group.cc:416`); the other ranks have the
// communicator and wait in their first collective, from 2.28 on those of its node in a barrier
// (2.30.7 `src/init.cc:1694`). `finalize` may follow with an empty context.
//
// What dynamiccl-run has prepared for this process is read when a communicator is made:
//
//   DYNAMICCL_JOB        16 hex digits: which run of which job.
//   DYNAMICCL_HOST       `uname -n` of the host that it was prepared on.
//   DYNAMICCL_MACHINE    this machine, without its NCCL.
//   DYNAMICCL_SYSTEMS    what the artifact calls it, by NCCL: "23007=b300 22809=b300-old".
//   DYNAMICCL_TABLES     absolute path of the artifact's tables.
//   DYNAMICCL_INDEX      16 hex digits of the digest of plugin.index.
//   DYNAMICCL_PROBLEM    why this process must not use a table.
//   DYNAMICCL_KILL_FILE  keeps new communicators from tables while it is there.
//   DYNAMICCL_WORD       1: communicators of one node are surely on one host; 0: on several, maybe;
//                        all: every one is on this host. Default: 1 without an arbiter.
//   DYNAMICCL_ARBITER    address of the job's arbiter, "1.2.3.4:PORT" or "[IPV6]:PORT".
//   DYNAMICCL_KEY        32 hex digits: the key of messages to and from it.
#pragma once

#include "agree/caller.h"
#include "choice.h"
#include "identity/communicator.h"
#include "table.h"

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

// ---- The steps of it, for mode adaptive too ----

/// How the ranks of a communicator meet.
struct Meeting {
  std::uint64_t job = 0;
  bool by_word = false;
  Arbiter arbiter;  // else
};

/// Null on success; else why this rank cannot meet the others, which is the same on all ranks that
/// were started alike.
const char* find_meeting(std::size_t num_nodes, Meeting* meeting) noexcept;

struct Prepared {
  const DecisionTable* table = nullptr;  // valid until the process ends; null: there is a problem
  Vote vote;
  char problem[320] = "";  // the vote has its beginning
};

/// This rank's vote, and its table, which it has read into its own memory. `asked_first` names the
/// vendor's tuner that is called before ours.
void prepare(const Communicator& communicator, const Checked& checked, const char* asked_first,
             const Meeting& meeting, Prepared* prepared) noexcept;

/// The vote of `init`, by word or arbiter; why there is no table is in `exchange->reply.reason`.
Verdict vote_in_init(const Meeting& meeting, const Vote& vote, Exchange* exchange) noexcept;

/// Says how the vote ended, and returns what `init` does.
ncclResult_t tell(const Communicator& communicator, Verdict verdict, const char* reason) noexcept;

}  // namespace dynamiccl
