// What NCCL told the profiler about a communicator, kept for the tuner, which is made next on the
// same thread and is told neither rank nor, before 2.28, id.
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

/// What this thread's latest profiler init was told, once, and only if it was of that communicator:
/// another one's tuner never came.
bool take_created(std::uint64_t comm_id, CreatedCommunicator* communicator) noexcept;

}  // namespace dynamiccl
