// Version 4 of NCCL's profiler ABI (NCCL 2.27), without what it tells of events (profiler_abi.h).
#pragma once

#include "nccl/tuner_abi.h"

extern "C" {
struct ncclProfilerEventDescr_v4_t;
union ncclProfilerEventStateArgs_v4_t;
typedef int ncclProfilerEventState_t;

// An error of `init` costs the profiler alone; the other results are not looked at. `commHash` and
// `commId` are one number. `eActivationMask` points to one int of the whole process, which NCCL
// reads at every call of its API.
struct ncclProfiler_v4_t {
  const char* name;
  ncclResult_t (*init)(void** context, int* eActivationMask, const char* commName,
                       std::uint64_t commHash, int nNodes, int nranks, int rank,
                       ncclDebugLogger_t logfn);
  ncclResult_t (*startEvent)(void* context, void** eHandle, ncclProfilerEventDescr_v4_t* eDescr);
  ncclResult_t (*stopEvent)(void* eHandle);
  ncclResult_t (*recordEventState)(void* eHandle, ncclProfilerEventState_t eState,
                                   ncclProfilerEventStateArgs_v4_t* eStateArgs);
  ncclResult_t (*finalize)(void* context);
};

}  // extern "C"
