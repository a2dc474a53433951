// What NCCL sees of the profiler: one struct for each ABI version, thin shells over Profiler.
//
// NCCL's own names are used, and every function returns ncclSuccess.
#include "nccl/profiler_abi.h"
#include "profiler/events.h"
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
  *context = Profiler::create({commId, rank, nranks, nNodes, eActivationMask, logfn, version > 4});
  return ncclSuccess;
}

ncclResult_t init_v4(void** context, int* eActivationMask, const char* commName,
                     std::uint64_t commHash, int nNodes, int nranks, int rank,
                     ncclDebugLogger_t logfn) noexcept {
  return init<4>(context, commHash, eActivationMask, commName, nNodes, nranks, rank, logfn);
}

template <typename Descr>
ncclResult_t startEvent(void* context, void** eHandle, Descr* eDescr) noexcept {
  if (eHandle == nullptr) return ncclSuccess;
  *eHandle = nullptr;
  if (eDescr == nullptr) return ncclSuccess;
  *eHandle = dynamiccl::start_event(static_cast<Profiler*>(context), *eDescr);
  return ncclSuccess;
}

ncclResult_t stopEvent(void* eHandle) noexcept {
  Profiler::stop(eHandle);
  return ncclSuccess;
}

ncclResult_t recordEventState(void* eHandle, ncclProfilerEventState_t eState,
                              ncclProfilerEventStateArgs_v4_t* eStateArgs) noexcept {
  dynamiccl::record_event_state(eHandle, eState, eStateArgs);
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
