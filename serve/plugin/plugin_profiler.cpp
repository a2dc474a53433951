// What NCCL sees of the profiler: one struct per ABI version, each a thin shell over Profiler.
//
// As in plugin.cpp NCCL's own names are used, and every function returns ncclSuccess.
#include "nccl/profiler_abi.h"
#include "profiler.h"

#define DYNAMICCL_EXPORT __attribute__((visibility("default")))

extern "C" {
// `const` alone would give these internal linkage.
extern DYNAMICCL_EXPORT const ncclProfiler_v4_t ncclProfiler_v4;
extern DYNAMICCL_EXPORT const ncclProfiler_v5_t ncclProfiler_v5;
extern DYNAMICCL_EXPORT const ncclProfiler_v6_t ncclProfiler_v6;
}

namespace {

using dynamiccl::Profiler;

constexpr char kName[] = "DynamICCL";

ncclResult_t init_v5(void** context, std::uint64_t commId, int* eActivationMask,
                     const char* /*commName*/, int nNodes, int nranks, int rank,
                     ncclDebugLogger_t logfn) noexcept {
  if (context == nullptr) return ncclSuccess;
  *context = Profiler::create({commId, rank, nranks, nNodes, eActivationMask, logfn, true});
  return ncclSuccess;
}

ncclResult_t init_v4(void** context, int* eActivationMask, const char* /*commName*/,
                     std::uint64_t commHash, int nNodes, int nranks, int rank,
                     ncclDebugLogger_t logfn) noexcept {
  if (context == nullptr) return ncclSuccess;
  *context = Profiler::create({commHash, rank, nranks, nNodes, eActivationMask, logfn, false});
  return ncclSuccess;
}

/// Null where nothing more needs to be heard of the event; NCCL looks at the handle then.
template <typename Descr>
void* start(Profiler* profiler, const Descr& event) noexcept {
  switch (event.type) {
    case ncclProfileKernelCh:
      return Profiler::start_kernel(event.parentObj, event.kernelCh.channelId,
                                    event.kernelCh.pTimer);
    case ncclProfileColl:
      return profiler->start_collective(event.coll, event.parentObj);
    case ncclProfileGroup:
      // Never null: without it 2.27 starts no events of collectives.
      return profiler->start_call(true, false);
    case ncclProfileP2p:
      profiler->start_other();
      return nullptr;
    default:
      return nullptr;
  }
}

ncclResult_t startEvent_v4(void* context, void** eHandle,
                           ncclProfilerEventDescr_v4_t* eDescr) noexcept {
  if (eHandle == nullptr) return ncclSuccess;
  *eHandle = nullptr;
  if (context == nullptr || eDescr == nullptr) return ncclSuccess;
  *eHandle = start(static_cast<Profiler*>(context), *eDescr);
  return ncclSuccess;
}

ncclResult_t startEvent_v5(void* context, void** eHandle,
                           ncclProfilerEventDescr_v5_t* eDescr) noexcept {
  if (eHandle == nullptr) return ncclSuccess;
  *eHandle = nullptr;
  if (context == nullptr || eDescr == nullptr) return ncclSuccess;
  auto* profiler = static_cast<Profiler*>(context);
  if (eDescr->type == ncclProfileCollApi) {
    *eHandle = profiler->start_call(false, eDescr->collApi.graphCaptured);
  } else if (eDescr->type == ncclProfileKernelLaunch) {
    profiler->launch();
  } else {
    *eHandle = start(profiler, *eDescr);
  }
  return ncclSuccess;
}

ncclResult_t stopEvent(void* eHandle) noexcept {
  Profiler::stop(eHandle);
  return ncclSuccess;
}

ncclResult_t recordEventState(void* eHandle, ncclProfilerEventState_t eState,
                              ncclProfilerEventStateArgs_v4_t* eStateArgs) noexcept {
  if (eState == ncclProfilerKernelChStop && eStateArgs != nullptr) {
    Profiler::stop_kernel(eHandle, eStateArgs->kernelCh.pTimer);
  }
  return ncclSuccess;
}

ncclResult_t finalize(void* context) noexcept {
  if (context != nullptr) static_cast<Profiler*>(context)->finalize();
  return ncclSuccess;
}

}  // namespace

const ncclProfiler_v4_t ncclProfiler_v4 = {kName,     init_v4,          startEvent_v4,
                                           stopEvent, recordEventState, finalize};
const ncclProfiler_v5_t ncclProfiler_v5 = {kName,     init_v5,          startEvent_v5,
                                           stopEvent, recordEventState, finalize};
const ncclProfiler_v6_t ncclProfiler_v6 = {kName,     init_v5,          startEvent_v5,
                                           stopEvent, recordEventState, finalize};
