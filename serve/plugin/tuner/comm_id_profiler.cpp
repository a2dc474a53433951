// A profiler without events: NCCL 2.27 passes a communicator's id to profilers only, just before
// the tuner's `init` and on its thread. The event mask stays empty, so NCCL creates no events.
#include "tuner/init.h"

extern "C" {
// v4 (v2.27.3-1 `src/include/plugin/profiler/profiler_v4.h`), with no events that could be read.
struct ncclProfiler_v4_t {
  const char* name;
  ncclResult_t (*init)(void** context, int* eActivationMask, const char* commName,
                       std::uint64_t commHash, int nNodes, int nranks, int rank,
                       ncclDebugLogger_t logfn);
  ncclResult_t (*startEvent)(void* context, void** eHandle, void* eDescr);
  ncclResult_t (*stopEvent)(void* eHandle);
  ncclResult_t (*recordEventState)(void* eHandle, int eState, void* eStateArgs);
  ncclResult_t (*finalize)(void* context);
};
extern DYNAMICCL_EXPORT const ncclProfiler_v4_t ncclProfiler_v4;
}

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
ncclResult_t startEvent(void*, void** eHandle, void*) noexcept {
  if (eHandle != nullptr) *eHandle = nullptr;
  return ncclSuccess;
}
ncclResult_t nothing(void*) noexcept { return ncclSuccess; }
ncclResult_t recordEventState(void*, int, void*) noexcept { return ncclSuccess; }

}  // namespace

std::uint64_t dynamiccl::take_comm_id(const Communicator& communicator) noexcept {
  const Communicator created = t_created;
  t_created = {};
  const bool fits =
      created.num_ranks == communicator.num_ranks && created.num_nodes == communicator.num_nodes;
  return fits ? created.comm_id : 0;
}

const ncclProfiler_v4_t ncclProfiler_v4 = {"DynamICCL",      init,   startEvent, nothing,
                                           recordEventState, nothing};
