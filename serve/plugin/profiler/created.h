// Passes what NCCL told the profiler about a communicator to the tuner, which is created next on
// the same thread and gets neither rank nor, before 2.28, id.
#pragma once

#include <cstdint>

namespace dynamiccl {

class Profiler;

/// A plain struct: it lives in thread-local memory.
struct CreatedCommunicator {
  std::uint64_t comm_id;
  std::int32_t rank;
  std::int32_t num_ranks;
  std::int32_t num_nodes;
  Profiler* profiler;  // null: it records nothing
};

/// Called by the profiler's init.
void remember_created(const CreatedCommunicator& communicator) noexcept;

/// The arguments of this thread's latest profiler init, once, and only if they are of that
/// communicator; otherwise a tuner was never created for them.
bool take_created(std::uint64_t comm_id, CreatedCommunicator* communicator) noexcept;

}  // namespace dynamiccl
