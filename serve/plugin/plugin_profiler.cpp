// What NCCL sees of the profiler: one struct per ABI version, each a thin shell over Profiler.
//
// As in plugin.cpp NCCL's own names are used, and every function returns ncclSuccess.
#include "heard.h"
#include "nccl/profiler_abi.h"
#include "next/profiler.h"
#include "profiler.h"

#define DYNAMICCL_EXPORT __attribute__((visibility("default")))

extern "C" {
// `const` alone would give these internal linkage.
extern DYNAMICCL_EXPORT const ncclProfiler_v4_t ncclProfiler_v4;
extern DYNAMICCL_EXPORT const ncclProfiler_v5_t ncclProfiler_v5;
extern DYNAMICCL_EXPORT const ncclProfiler_v6_t ncclProfiler_v6;
}

namespace {

using dynamiccl::hear_start;
using dynamiccl::hear_state;
using dynamiccl::NextPlugin;
using dynamiccl::Pairs;
using dynamiccl::ProfiledCommunicator;
using dynamiccl::Profiler;
using dynamiccl::ProfilerLink;

constexpr char kName[] = "DynamICCL";

template <int version>
ncclResult_t init(void** context, std::uint64_t commId, int* eActivationMask, const char* commName,
                  int nNodes, int nranks, int rank, ncclDebugLogger_t logfn) noexcept {
  if (context == nullptr) return ncclSuccess;
  const ProfiledCommunicator communicator = {commId,          rank,  nranks,     nNodes,
                                             eActivationMask, logfn, version > 4};
  const NextPlugin* next = ProfilerLink::find(version, logfn);
  *context = next == nullptr ? Profiler::create(communicator)
                             : ProfilerLink::create(next, communicator, commName);
  return ncclSuccess;
}

ncclResult_t init_v4(void** context, int* eActivationMask, const char* commName,
                     std::uint64_t commHash, int nNodes, int nranks, int rank,
                     ncclDebugLogger_t logfn) noexcept {
  return init<4>(context, commHash, eActivationMask, commName, nNodes, nranks, rank, logfn);
}

ncclResult_t startEvent_v4(void* context, void** eHandle,
                           ncclProfilerEventDescr_v4_t* eDescr) noexcept {
  if (eHandle == nullptr) return ncclSuccess;
  *eHandle = nullptr;
  if (context == nullptr || eDescr == nullptr) return ncclSuccess;
  *eHandle = ProfilerLink::is_context(context)
                 ? ProfilerLink::start(context, *eDescr)
                 : hear_start(static_cast<Profiler*>(context), *eDescr);
  return ncclSuccess;
}

template <int version>
ncclResult_t startEvent(void* context, void** eHandle,
                        ncclProfilerEventDescr_v5_t* eDescr) noexcept {
  if (eHandle == nullptr) return ncclSuccess;
  *eHandle = nullptr;
  if (context == nullptr || eDescr == nullptr) return ncclSuccess;
  *eHandle = ProfilerLink::is_context(context)
                 ? ProfilerLink::start(version, context, *eDescr)
                 : hear_start(static_cast<Profiler*>(context), *eDescr);
  return ncclSuccess;
}

ncclResult_t stopEvent(void* eHandle) noexcept {
  Pairs::is_handle(eHandle) ? ProfilerLink::stop(eHandle) : Profiler::stop(eHandle);
  return ncclSuccess;
}

ncclResult_t recordEventState(void* eHandle, ncclProfilerEventState_t eState,
                              ncclProfilerEventStateArgs_v4_t* eStateArgs) noexcept {
  Pairs::is_handle(eHandle) ? ProfilerLink::record(eHandle, eState, eStateArgs)
                            : hear_state(eHandle, eState, eStateArgs);
  return ncclSuccess;
}

ncclResult_t finalize(void* context) noexcept {
  if (context == nullptr) return ncclSuccess;
  ProfilerLink::is_context(context) ? ProfilerLink::finalize(context)
                                    : static_cast<Profiler*>(context)->finalize();
  return ncclSuccess;
}

}  // namespace

const ncclProfiler_v4_t ncclProfiler_v4 = {kName,     init_v4,          startEvent_v4,
                                           stopEvent, recordEventState, finalize};
const ncclProfiler_v5_t ncclProfiler_v5 = {kName,     init<5>,          startEvent<5>,
                                           stopEvent, recordEventState, finalize};
const ncclProfiler_v6_t ncclProfiler_v6 = {kName,     init<6>,          startEvent<6>,
                                           stopEvent, recordEventState, finalize};
