// Passes what NCCL told the profiler about a communicator to the tuner, which is created next on
// the same thread and gets neither rank nor, before 2.28, id. Both inits of a communicator run on
// one thread, the profiler's first (`src/init.cc`, ncclCommInitRankFunc, 2.28.9 to 2.30.7), so
// ranks of one communicator that share a process are not mixed up.
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

inline thread_local CreatedCommunicator t_created = {};
inline thread_local bool t_has_created = false;

/// Called by the profiler's init.
inline void remember_created(const CreatedCommunicator& communicator) noexcept {
  t_created = communicator;
  t_has_created = true;
}

/// The arguments of this thread's latest profiler init, once, and only if they are of that
/// communicator; otherwise a tuner was never created for them.
inline bool take_created(std::uint64_t comm_id, CreatedCommunicator* communicator) noexcept {
  const bool is_there = t_has_created;
  t_has_created = false;
  *communicator = t_created;
  return is_there && communicator->comm_id == comm_id;
}

}  // namespace dynamiccl
