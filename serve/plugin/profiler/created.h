// Passes what NCCL told the profiler about a communicator to the tuner, which is created next on
// the same thread and gets neither rank nor, before 2.28, id. Both inits of a communicator run on
// one thread, the profiler's first (`src/init.cc`, ncclCommInitRankFunc, 2.28.9 to 2.30.7), so
// ranks of one communicator that share a process are not mixed up.
#pragma once

#include <cstdint>

namespace dynamiccl {

struct Profiler;

struct CreatedCommunicator {
  std::uint64_t comm_id;  // 0: none
  std::int32_t rank;
  std::int32_t num_ranks;
  std::int32_t num_nodes;
  Profiler* profiler;  // null: it records nothing
};

/// Of this thread's latest profiler init, until a tuner has taken it.
inline thread_local CreatedCommunicator t_created = {};

/// Once, and only if it is of that communicator: else a tuner was never created for it.
inline bool take_created(std::uint64_t comm_id, CreatedCommunicator* communicator) noexcept {
  *communicator = t_created;
  t_created = {};
  return comm_id != 0 && communicator->comm_id == comm_id;
}

}  // namespace dynamiccl
