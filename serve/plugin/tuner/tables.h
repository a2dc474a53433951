// Tables of a process: each is read and checked once, and stays valid until the process ends. So a
// communicator's context is a plain pointer, nothing has to be freed, and a call inside getCollInfo
// is safe while another thread aborts the communicator (`src/init.cc`).
#pragma once

#include "table.h"
#include "tuner/message.h"

namespace dynamiccl {

struct NewCommunicator {
  std::size_t num_ranks;
  std::size_t num_nodes;
  std::uint64_t comm_id;
  int nccl_version;         // as ncclGetVersion says
  const char* asked_first;  // the vendor's tuner that is asked before ours, or "none"
};

/// What one rank contributes to the agreement.
struct Prepared {
  const DecisionTable* table = nullptr;  // null: the identity says why
  char identity[kMaxIdentityBytes] = "";
};

/// Reads DYNAMICCL_ARTIFACT for a communicator of this shape, on a thread of its own that is
/// abandoned after `limit_ms`: a file system may stall. The identity begins with "problem=none", or
/// with why this rank cannot use the artifact.
void prepare(const NewCommunicator& communicator, std::uint64_t limit_ms,
             Prepared* prepared) noexcept;

/// The same for a rank that must not use the artifact, with the reason.
void prepare_objection(const char* problem, Prepared* prepared) noexcept;

}  // namespace dynamiccl
