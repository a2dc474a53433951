// What a rank does in `init`: who it is, what it votes, and how long it waits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tuner/tables.h"
#include "tuner/voter.h"

namespace dynamiccl {

struct NewCommunicator {
  std::size_t num_ranks;
  std::size_t num_nodes;
  std::uint64_t comm_id;                     // 0: not told (before NCCL 2.27)
  int nccl_version;                          // as ncclGetVersion says; 0: unknown
  bool is_rccl;                              // AMD's, with other algorithms
  const ncclTunerConstants_v5_t* constants;  // NCCL's own; null before 2.28
  bool is_even;             // each of its NVLink domains holds as many ranks, as far as is told
  const char* asked_first;  // the vendor's tuner that is asked before ours, or "none"
};

struct Agreed {
  Outcome outcome;
  // Where the outcome is kTable, one of them.
  const DecisionTable* table;
  const TunerConstants* constants;
  char reason[kMaxReasonBytes];
};

/// Asks the other ranks; returns within 6 limits (voter.h), and half a second: half a limit for the
/// files and the coordinator's address, half for the coordinator, 2 until all have voted, 3 once
/// this rank has confirmed. Only where a coordinator is lost does it take more than 2.
void agree(const NewCommunicator& communicator, Agreed* agreed) noexcept;

/// Remembers the id of a communicator, whatever becomes of it; whether ids may repeat from now on
/// in what this process takes part in.
///
/// All shrinks of one parent have one id, and so have their children (2.30.7
/// `init.cc:1875-1880,3143-3152`). A first shrink is known by its parent's id. What is made of it
/// later cannot be told from a communicator of ncclCommInitRank: its id is a hash, of a colour
/// among others. So after a first shrink all later communicators of the process object, and the
/// coordinator, once it has heard of one, abstains on all later ones of the job: ranks that join by
/// ncclCommGrow have seen no shrink.
bool note_id(std::uint64_t id) noexcept;

/// NCCL's hash for the child of a shrink (2.30.7 `bitops.h:502`).
std::uint64_t id_of_shrunk(std::uint64_t parent_id) noexcept;

}  // namespace dynamiccl
