// How a tuner finds the profiler of its communicator, which alone is told rank and, before 2.28,
// id.
#pragma once

#include <cstdint>

namespace dynamiccl {

class Profiler;

/// What a profiler was told about its communicator. A plain struct: it lives in thread-local
/// memory.
struct Join {
  std::uint64_t comm_id;
  std::int32_t rank;
  std::int32_t num_ranks;
  std::int32_t num_nodes;
  Profiler* profiler;  // null: it records nothing
};

/// Called by the profiler's init.
void offer_join(const Join& join) noexcept;

/// The latest profiler init of this thread, once: NCCL 2.27 initialises the tuner next, in the same
/// call. False when there was none, or it has been taken.
bool take_latest_join(Join* join) noexcept;

/// The same when it is of that communicator, as from 2.28 on the tuner is told. One of another
/// communicator is dropped: its tuner never came.
bool take_join_of(std::uint64_t comm_id, Join* join) noexcept;

}  // namespace dynamiccl
