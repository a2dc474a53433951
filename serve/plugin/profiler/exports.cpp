// What NCCL sees of the profiler: one struct for each ABI version, thin shells over Profiler.
//
// NCCL's own names are used, and every function returns ncclSuccess.
#include "nccl/profiler_abi.h"
#include "profiler/profiler.h"

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

template <int version>
ncclResult_t init(void** context, std::uint64_t commId, int* eActivationMask, const char*,
                  int nNodes, int nranks, int rank, ncclDebugLogger_t logfn) noexcept {
  if (context == nullptr) return ncclSuccess;
  *context = Profiler::create(
      {commId, rank, nranks, nNodes, eActivationMask, logfn, version > 4, version > 5});
  return ncclSuccess;
}

ncclResult_t init_v4(void** context, int* eActivationMask, const char* commName,
                     std::uint64_t commHash, int nNodes, int nranks, int rank,
                     ncclDebugLogger_t logfn) noexcept {
  return init<4>(context, commHash, eActivationMask, commName, nNodes, nranks, rank, logfn);
}

/// A handle; null where nothing more needs to be heard of the event, and NCCL looks at that.
/// `profiler` may be null.
void* start(Profiler* profiler, std::uint64_t type, const ncclProfilerEventDescr_v5_t& event) {
  if (type == ncclProfileGroupApi) return Profiler::start_group();
  if (profiler == nullptr) return nullptr;
  switch (type) {
    case ncclProfileCollApi:
      return profiler->start_call(event.collApi, event.parentObj);
    case ncclProfileKernelLaunch:
      profiler->launch(event.parentObj);
      return nullptr;
    case ncclProfileKernelCh:
      return Profiler::start_kernel(event.parentObj, event.kernelCh.channelId,
                                    event.kernelCh.pTimer);
    case ncclProfileColl:
      return profiler->start_collective(event.coll, event.parentObj);
    case ncclProfileGroup:
      return profiler->start_plan();
    case ncclProfileP2p:
      profiler->start_other();
      return nullptr;
    default:
      return nullptr;
  }
}

/// v4's descriptor differs from that of v5 and v6 in the width of its type, and in what comes after
/// the parts that they have in common.
template <typename Descr>
ncclResult_t startEvent(void* context, void** eHandle, Descr* eDescr) noexcept {
  if (eHandle == nullptr) return ncclSuccess;
  *eHandle = nullptr;
  if (eDescr == nullptr) return ncclSuccess;
  *eHandle = start(static_cast<Profiler*>(context), eDescr->type,
                   *reinterpret_cast<const ncclProfilerEventDescr_v5_t*>(eDescr));
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

const ncclProfiler_v4_t ncclProfiler_v4 = {
    kName, init_v4, startEvent<ncclProfilerEventDescr_v4_t>, stopEvent, recordEventState, finalize};
const ncclProfiler_v5_t ncclProfiler_v5 = {
    kName, init<5>, startEvent<ncclProfilerEventDescr_v5_t>, stopEvent, recordEventState, finalize};
const ncclProfiler_v6_t ncclProfiler_v6 = {
    kName, init<6>, startEvent<ncclProfilerEventDescr_v5_t>, stopEvent, recordEventState, finalize};
