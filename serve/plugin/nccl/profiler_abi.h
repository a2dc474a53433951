// NCCL's profiler ABI, versions 4 to 6, declared by us from NVIDIA/nccl's published interface.
//
// One plugin exports all three structs; NCCL takes the newest that it knows
// (`src/plugin/profiler.cc`): v4 in 2.27, v5 in 2.28, v6 from 2.29. Older versions carry no GPU
// time stamps. Layouts are whole, since events are handed on to a vendor's profiler; only what we
// read has its meaning stated, with NCCL's own spelling.
#pragma once

#include <cstddef>
#include <cstdint>

#include "nccl/profiler_v4.h"

extern "C" {

// `src/include/plugin/nccl_profiler.h`: bits of the event mask, and the `type` of an event. A bit
// that is set also brings the events above it in the tree, asked for or not: with Coll, NCCL starts
// a Group event for each plan, and from v5 on a GroupApi and a CollApi event for each call.
enum ncclProfilerEventType : int {
  ncclProfileGroup = 1,
  ncclProfileColl = 2,
  ncclProfileP2p = 4,
  ncclProfileProxyOp = 8,
  ncclProfileProxyStep = 16,
  ncclProfileProxyCtrl = 32,
  ncclProfileKernelCh = 64,
  ncclProfileNetPlugin = 128,
  ncclProfileGroupApi = 256,       // from v5 on
  ncclProfileCollApi = 512,        // from v5 on
  ncclProfileP2pApi = 1024,        // from v5 on
  ncclProfileKernelLaunch = 2048,  // from v5 on
  ncclProfileCeColl = 4096,        // from v6 on: work of the copy engines
  ncclProfileCeSync = 8192,        // from v6 on
  ncclProfileCeBatch = 16384,      // from v6 on
};

// The one state that we take is KernelChStop: the kernel of a channel has ended, at `pTimer`.
enum : int {
  ncclProfilerProxyStepSendGPUWait = 8,  // the first in use; to the next: of ProxyStep
  ncclProfilerProxyCtrlIdle = 13,        // to ProxyCtrlAppendEnd: of ProxyCtrl
  ncclProfilerProxyCtrlAppendEnd = 18,
  ncclProfilerProxyStepSendPeerWait = 20,
  ncclProfilerKernelChStop = 22,      // the last of v4
  ncclProfilerGroupEndApiStart = 24,  // the last of v5
  ncclProfilerCeBatchComplete = 30,   // the last of v6
};

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

struct ncclProfilerGroupApi_v5_t {
  bool graphCaptured;
  int groupDepth;
};

// Send and Recv as such a call, and their launch.
struct ncclProfilerP2pApi_v5_t {
  const char* func;
  std::size_t count;
  const char* datatype;
  void* stream;
  bool graphCaptured;
};

struct ncclProfilerP2p_v4_t {
  const char* func;
  void* buff;
  const char* datatype;
  std::size_t count;
  int peer;
  std::uint8_t nChannels;
};

// `coll` and `p2p` of v5 and v6: one pointer more, the handle of the Group event, which is what v4
// has as `parentObj`.
struct ncclProfilerColl_v5_t {
  ncclProfilerColl_v4_t head;
  void* parentGroup;
};

struct ncclProfilerP2p_v5_t {
  ncclProfilerP2p_v4_t head;
  void* parentGroup;
};

// Of the proxy's thread. With PXN it works for another process, whose `pid` this is: then
// `parentObj` and the context are pointers of that process.
struct ncclProfilerProxyOp_v4_t {
  int pid;
  std::uint8_t channelId;
  int peer;
  int nSteps;
  int chunkSize;
  int isSend;
};

struct ncclProfilerNetPlugin_v4_t {
  std::int64_t id;
  void* data;
};

struct ncclProfilerCeColl_v6_t {
  std::uint64_t seqNumber;
  const char* func;
  const void* sendBuff;
  void* recvBuff;
  std::size_t count;
  int root;
  const char* datatype;
  const char* syncStrategy;
  bool intraBatchSync;
  std::uint32_t batchSize;
  std::uint32_t numBatches;
  std::uint32_t ceSeqNum;
  void* stream;
};

// The kernel of a collective on one channel, seen by the proxy's thread.
struct ncclProfilerKernelCh_v4_t {
  std::uint8_t channelId;
  std::uint64_t pTimer;  // GPU globaltimer in ns, when it began
};

// NCCL 2.27 (`src/include/plugin/profiler/profiler_v4.h`). `parentObj` is the handle of the Group
// event for Coll, and of the Coll event for KernelCh.
struct ncclProfilerEventDescr_v4_t {
  std::uint8_t type;
  void* parentObj;
  int rank;
  union {
    ncclProfilerColl_v4_t coll;
    ncclProfilerP2p_v4_t p2p;
    ncclProfilerProxyOp_v4_t proxyOp;
    ncclProfilerKernelCh_v4_t kernelCh;
    ncclProfilerNetPlugin_v4_t netPlugin;
  };
};

// NCCL 2.28 (`src/include/plugin/profiler/profiler_v5.h`): `type` is wide, and `parentObj` of Coll
// is the handle of the CollApi event. v6 adds the copy engines', which are as large as `coll`.
struct ncclProfilerEventDescr_v5_t {
  std::uint64_t type;
  void* parentObj;
  int rank;
  union {
    ncclProfilerGroupApi_v5_t groupApi;
    ncclProfilerCollApi_v5_t collApi;
    ncclProfilerP2pApi_v5_t p2pApi;
    ncclProfilerColl_v4_t coll;
    ncclProfilerColl_v5_t collOfGroup;  // `coll` and its Group
    ncclProfilerP2p_v4_t p2p;
    ncclProfilerP2p_v5_t p2pOfGroup;  // `p2p` and its Group
    ncclProfilerProxyOp_v4_t proxyOp;
    ncclProfilerKernelCh_v4_t kernelCh;
    ncclProfilerNetPlugin_v4_t netPlugin;
    ncclProfilerCeColl_v6_t ceColl;
  };
};
typedef ncclProfilerEventDescr_v5_t ncclProfilerEventDescr_v6_t;

union ncclProfilerEventStateArgs_v4_t {
  std::size_t transSize;  // of states that we do not take, like the next two
  int appendedProxyOps;
  void* data;
  struct {
    std::uint64_t pTimer;
  } kernelCh;
};
typedef ncclProfilerEventStateArgs_v4_t ncclProfilerEventStateArgs_v5_t;
typedef ncclProfilerEventStateArgs_v4_t ncclProfilerEventStateArgs_v6_t;

struct ncclProfiler_v5_t {
  const char* name;
  ncclResult_t (*init)(void** context, std::uint64_t commId, int* eActivationMask,
                       const char* commName, int nNodes, int nranks, int rank,
                       ncclDebugLogger_t logfn);
  ncclResult_t (*startEvent)(void* context, void** eHandle, ncclProfilerEventDescr_v5_t* eDescr);
  ncclResult_t (*stopEvent)(void* eHandle);
  ncclResult_t (*recordEventState)(void* eHandle, ncclProfilerEventState_t eState,
                                   ncclProfilerEventStateArgs_v5_t* eStateArgs);
  ncclResult_t (*finalize)(void* context);
};
typedef ncclProfiler_v5_t ncclProfiler_v6_t;

}  // extern "C"

static_assert(offsetof(ncclProfilerEventDescr_v4_t, coll) == 24, "NCCL's layout, 64-bit");
static_assert(offsetof(ncclProfilerEventDescr_v5_t, coll) == 24, "NCCL's layout, 64-bit");
static_assert(offsetof(ncclProfilerColl_v4_t, nChannels) == 56 &&
                  offsetof(ncclProfilerColl_v4_t, proto) == 72,
              "NCCL's layout, 64-bit");
static_assert(offsetof(ncclProfilerColl_v5_t, parentGroup) == 80 &&
                  offsetof(ncclProfilerP2p_v5_t, parentGroup) == 40 &&
                  offsetof(ncclProfilerCeColl_v6_t, stream) == 80,
              "NCCL's layout, 64-bit");
static_assert(sizeof(ncclProfilerEventDescr_v4_t) == 104 &&
                  sizeof(ncclProfilerEventDescr_v5_t) == 112,
              "NCCL's layout, 64-bit");
