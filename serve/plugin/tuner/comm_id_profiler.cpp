// A profiler without events: NCCL 2.27 passes a communicator's id to profilers only, just before
// the tuner's `init` and on its thread. The event mask stays empty, so NCCL creates no events.
#include "nccl/profiler_abi.h"
#include "tuner/init.h"

namespace {

thread_local dynamiccl::Communicator t_created = {};

ncclResult_t init(void** context, int* eActivationMask, const char*, std::uint64_t commHash,
                  int nNodes, int nranks, int, ncclDebugLogger_t) noexcept {
  if (context != nullptr) *context = nullptr;
  // One mask for the whole process: communicators of a group are created concurrently.
  if (eActivationMask != nullptr) __atomic_store_n(eActivationMask, 0, __ATOMIC_RELAXED);
  t_created.num_ranks = static_cast<std::size_t>(nranks);
  t_created.num_nodes = static_cast<std::size_t>(nNodes);
  t_created.comm_id = commHash;
  return ncclSuccess;
}
ncclResult_t startEvent(void*, void** eHandle, ncclProfilerEventDescr_v4_t*) noexcept {
  if (eHandle != nullptr) *eHandle = nullptr;
  return ncclSuccess;
}
ncclResult_t nothing(void*) noexcept { return ncclSuccess; }
ncclResult_t recordEventState(void*, ncclProfilerEventState_t,
                              ncclProfilerEventStateArgs_v4_t*) noexcept {
  return ncclSuccess;
}

}  // namespace

std::uint64_t dynamiccl::take_comm_id(const Communicator& communicator) noexcept {
  const Communicator created = t_created;
  t_created = {};
  if (created.num_ranks != communicator.num_ranks) return 0;
  return created.num_nodes == communicator.num_nodes ? created.comm_id : 0;
}

DYNAMICCL_EXPORT const ncclProfiler_v4_t ncclProfiler_v4 = {
    "DynamICCL", init, startEvent, nothing, recordEventState, nothing};
