// The tables and tuning constants of a process: each is read and checked once, and stays until the
// process ends. So a communicator's context is a pointer to one, nothing has to be freed, and a
// call that is inside getCollInfo while another thread aborts the communicator (`src/init.cc`) is
// safe.
#pragma once

#include "table.h"
#include "tuner/constants.h"
#include "tuner/message.h"

namespace dynamiccl {

/// What one rank brings to the agreement.
struct Prepared {
  bool is_sound() const noexcept { return table != nullptr || constants != nullptr; }

  // One of them, or neither: then the identity says why.
  const DecisionTable* table = nullptr;
  const TunerConstants* constants = nullptr;
  char identity[kMaxIdentityBytes] = "";
};

/// What is prepared for.
struct Shape {
  std::size_t num_ranks, num_nodes;
  int nccl_version;
  const ncclTunerConstants_v5_t* constants;  // NCCL's own, or null where it shows none
  const char* asked_first;                   // the vendor's tuner, or "none"
};

/// Reads DYNAMICCL_ARTIFACT for a communicator of this shape, on a thread of its own, which is
/// given up after `limit_ms`: a file system may stall. The identity begins with "problem=none", or
/// with why this rank cannot use the artifact.
void prepare(const Shape& shape, std::uint64_t limit_ms, Prepared* prepared) noexcept;

/// The same of a rank that must not use it, whatever it holds.
void prepare_objection(const char* problem, Prepared* prepared) noexcept;

}  // namespace dynamiccl
