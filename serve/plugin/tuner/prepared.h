// What dynamiccl-run has prepared for this process, read when a communicator is made; and the one
// table file of that communicator.
//
// clang-format off
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
// clang-format on
#pragma once

#include "agree/caller.h"
#include "identity/communicator.h"
#include "table.h"

namespace dynamiccl {

/// How the ranks of a communicator meet.
struct Meeting {
  std::uint64_t job = 0;
  bool by_word = false;
  ArbiterAddress arbiter;  // else
  Key key;
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

}  // namespace dynamiccl
