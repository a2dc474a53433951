// Both inits of a communicator run on one thread, the profiler's first (`src/init.cc`,
// ncclCommInitRankFunc, 2.28.9 to 2.30.7), so ranks of one communicator that share a process are
// not mixed up.
#include "profiler/created.h"

namespace dynamiccl {
namespace {

struct Latest {
  CreatedCommunicator communicator;
  bool is_there;
};

thread_local Latest t_latest;

}  // namespace

void remember_created(const CreatedCommunicator& communicator) noexcept {
  t_latest = {communicator, true};
}

bool take_created(std::uint64_t comm_id, CreatedCommunicator* communicator) noexcept {
  const bool is_there = t_latest.is_there;
  t_latest.is_there = false;
  *communicator = t_latest.communicator;
  return is_there && communicator->comm_id == comm_id;
}

}  // namespace dynamiccl
