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
  const ncclTunerConstants_v5_t* constants;  // NCCL's own; null before 2.28
  bool is_even;  // each of its NVLink domains holds as many ranks, as far as is told
};

struct Agreed {
  Outcome outcome;
  // Where the outcome is kTable, one of them.
  const DecisionTable* table;
  const TunerConstants* constants;
  char reason[kMaxReasonBytes];
};

/// Asks the other ranks; returns within 3.5 limits (voter.h), or 5 s more where a name server is
/// silent.
void agree(const NewCommunicator& communicator, Agreed* agreed) noexcept;

/// NCCL's hash for the child of a shrink: all shrinks of one parent have the same one (2.30.7
/// `init.cc:1875-1879,3143-3152`, `bitops.h:502`).
std::uint64_t id_of_shrunk(std::uint64_t parent_id) noexcept;

}  // namespace dynamiccl
