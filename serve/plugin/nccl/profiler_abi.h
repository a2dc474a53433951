// NCCL's profiler ABI, versions 4 to 6, declared by us from NVIDIA/nccl's published interface, in
// NCCL's own spelling, as far as we read it.
//
// A library exports all three; NCCL takes the newest that it knows (`src/plugin/profiler.cc`): v4
// in 2.27, v5 in 2.28, v6 from 2.29. Older versions carry no GPU time stamps.
#pragma once

#include <cstddef>
#include <cstdint>

#include "nccl/tuner_abi.h"

extern "C" {

// `src/include/plugin/nccl_profiler.h`: bits of the event mask, and the `type` of an event. A bit
// that is set also brings the events above it in the tree, asked for or not: with Coll, NCCL starts
// a Group event for each plan, and from v5 on a GroupApi and a CollApi event for each call.
enum ncclProfilerEventType : int {
  ncclProfileGroup = 1,
  ncclProfileColl = 2,
  ncclProfileP2p = 4,
  ncclProfileKernelCh = 64,
  // From v5 on:
  ncclProfileGroupApi = 256,
  ncclProfileCollApi = 512,
  ncclProfileP2pApi = 1024,
  ncclProfileKernelLaunch = 2048,
};

// Of recordEventState: the kernel of a channel has ended, at `pTimer`.
enum : int { ncclProfilerKernelChStop = 22 };

// A collective that has been put on its stream. `count` is in elements; NCCL turns AllGather and
// Broadcast into bytes (ncclInt8) first (`src/enqueue.cc`, collTaskAppend).
struct ncclProfilerColl_v4_t {
  std::uint64_t seqNumber;  // per communicator and function; not raised for captured collectives
  const char* func;
  const void* sendBuff;
  void* recvBuff;
  std::size_t count;
  int root;
  const char* datatype;
  std::uint8_t nChannels;  // really used
  std::uint8_t nWarps;
  const char* algo;
  const char* proto;
};

// A call of the API, in the caller's thread, before the collective is planned (v5 and v6).
struct ncclProfilerCollApi_v5_t {
  const char* func;
  std::size_t count;
  const char* datatype;
  int root;
  void* stream;
  bool graphCaptured;
};

// The kernel of a collective on one channel, seen by the proxy's thread.
struct ncclProfilerKernelCh_v4_t {
  std::uint8_t channelId;
  std::uint64_t pTimer;  // GPU globaltimer in ns, when it began
};

// NCCL 2.27 (`src/include/plugin/profiler/profiler_v4.h`). `parentObj` is the handle of a Coll's
// Group event, and of a KernelCh's Coll event.
struct ncclProfilerEventDescr_v4_t {
  std::uint8_t type;
  void* parentObj;
  int rank;
  union {
    ncclProfilerColl_v4_t coll;  // the largest
    ncclProfilerKernelCh_v4_t kernelCh;
  };
};

// From NCCL 2.28 on (profiler_v5.h): `type` is wide, and `parentObj` of a Coll is the handle of its
// CollApi event; behind `coll` is that of the Group event.
struct ncclProfilerEventDescr_v5_t {
  std::uint64_t type;
  void* parentObj;
  int rank;
  union {
    ncclProfilerCollApi_v5_t collApi;
    ncclProfilerColl_v4_t coll;
    ncclProfilerKernelCh_v4_t kernelCh;
    char largest[88];
  };
};

union ncclProfilerEventStateArgs_v4_t {
  struct {
    std::uint64_t pTimer;
  } kernelCh;
};
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

struct ncclProfiler_v5_t {
  const char* name;
  ncclResult_t (*init)(void** context, std::uint64_t commId, int* eActivationMask,
                       const char* commName, int nNodes, int nranks, int rank,
                       ncclDebugLogger_t logfn);
  ncclResult_t (*startEvent)(void* context, void** eHandle, ncclProfilerEventDescr_v5_t* eDescr);
  ncclResult_t (*stopEvent)(void* eHandle);
  ncclResult_t (*recordEventState)(void* eHandle, ncclProfilerEventState_t eState,
                                   ncclProfilerEventStateArgs_v4_t* eStateArgs);
  ncclResult_t (*finalize)(void* context);
};
typedef ncclProfiler_v5_t ncclProfiler_v6_t;

}  // extern "C"

static_assert(offsetof(ncclProfilerEventDescr_v4_t, coll) == 24 &&
                  offsetof(ncclProfilerEventDescr_v5_t, coll) == 24 &&
                  offsetof(ncclProfilerColl_v4_t, nChannels) == 56 &&
                  offsetof(ncclProfilerColl_v4_t, proto) == 72 &&
                  sizeof(ncclProfilerEventDescr_v4_t) == 104 &&
                  sizeof(ncclProfilerEventDescr_v5_t) == 112,
              "NCCL's layout, 64-bit");
