// The tables of a process: each is read and checked once, and stays until the process ends. So a
// communicator's context is a pointer to one, nothing has to be freed, and a call that is inside
// getCollInfo while another thread aborts the communicator (`src/init.cc`) is safe.
#pragma once

#include "table.h"
#include "tuner/message.h"

namespace dynamiccl {

/// What one rank brings to the agreement.
struct Prepared {
  const DecisionTable* table = nullptr;  // null: `problem`
  char identity[kMaxIdentityBytes] = "";
};

/// Reads DYNAMICCL_ARTIFACT for a communicator of this shape. The identity begins with
/// "problem=none", or with why this rank cannot use the artifact.
void prepare(std::size_t num_ranks, std::size_t num_nodes, int nccl_version,
             Prepared* prepared) noexcept;

}  // namespace dynamiccl
