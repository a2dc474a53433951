// Both inits of a communicator run on one thread, the profiler's first (`src/init.cc`,
// ncclCommInitRankFunc, 2.27.7 to 2.30.7): what one leaves there the other finds, and ranks of one
// communicator that share a process are not mixed up.
#include "history/joins.h"

namespace dynamiccl {
namespace {

struct Offer {
  Join join;
  bool is_open;
};

thread_local Offer t_latest;

}  // namespace

void offer_join(const Join& join) noexcept { t_latest = {join, true}; }

bool take_latest_join(Join* join) noexcept {
  const bool is_open = t_latest.is_open;
  if (is_open) *join = t_latest.join;
  t_latest.is_open = false;
  return is_open;
}

bool take_join_of(std::uint64_t comm_id, Join* join) noexcept {
  return take_latest_join(join) && join->comm_id == comm_id;
}

}  // namespace dynamiccl
