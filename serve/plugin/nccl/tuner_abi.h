// NCCL's tuner ABI, versions 4 to 6, declared by us from NVIDIA/nccl's published interface, in
// NCCL's own spelling: nothing of NCCL is needed to build or test the plugin.
//
// A library exports all three; NCCL takes the newest that it knows (`src/misc/tuner.cc` to 2.25,
// `src/plugin/tuner.cc` from 2.26). Older versions have no use: no table acts before 2.27.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

// `src/nccl.h.in`. Any other value than success fails the collective in every version, or, from
// `init`, the communicator: the calls are wrapped in NCCLCHECK, whatever the header's comment says.
enum ncclResult_t : int {
  ncclSuccess = 0,
  ncclSystemError = 2,
  ncclInvalidUsage = 5,
  ncclRemoteError = 6
};

// `src/include/nccl_common.h`. An int, not an enum, since NCCL may one day pass a new value.
typedef int ncclFunc_t;

// `src/include/nccl_common.h`; the levels and subsystem bits that we use.
enum ncclDebugLogLevel : int { NCCL_LOG_WARN = 2, NCCL_LOG_INFO = 3 };
enum ncclDebugLogSubSys : unsigned long { NCCL_INIT = 0x1, NCCL_TUNING = 0x40 };
typedef void (*ncclDebugLogger_t)(ncclDebugLogLevel level, unsigned long flags, const char* file,
                                  int line, const char* format, ...);

// `collCostTable` is typed float** and is one flat float[numAlgo][numProto] of microseconds, -1.0
// where a combination is not available (`src/enqueue.cc`, topoGetAlgoInfo). `nBytes` is count x
// element size, x ranks for AllGather and ReduceScatter. `*nChannels` is 0 before the call, which
// means that NCCL decides. `regBuff` is one rank's own view of its buffers.
typedef ncclResult_t (*ncclTunerGetCollInfo_v4_t)(void* context, ncclFunc_t collType,
                                                  std::size_t nBytes, int numPipeOps,
                                                  float** collCostTable, int numAlgo, int numProto,
                                                  int regBuff, int* nChannels);

// `src/include/plugin/nccl_tuner.h`.
struct ncclNvlDomainInfo_v5_t {
  int nNvlDomains;
  int minRanksPerNvlDomain;
  int maxRanksPerNvlDomain;
};

// The cost model's constants, in and out: what `init` leaves there, the model is made from (2.30.7
// `src/init.cc:1639`). We leave them alone.
struct ncclTunerConstants_v5_t;

typedef ncclResult_t (*ncclTunerInit_v5_t)(void** context, std::uint64_t commId, std::size_t nRanks,
                                           std::size_t nNodes, ncclDebugLogger_t logFunction,
                                           ncclNvlDomainInfo_v5_t* nvlDomainInfo,
                                           ncclTunerConstants_v5_t* constants);

typedef ncclResult_t (*ncclTunerInit_v4_t)(std::size_t nRanks, std::size_t nNodes,
                                           ncclDebugLogger_t logFunction, void** context);
typedef ncclResult_t (*ncclTunerGetCollInfo_v3_t)(void* context, ncclFunc_t collType,
                                                  std::size_t nBytes, int numPipeOps,
                                                  float** collCostTable, int numAlgo, int numProto,
                                                  int* nChannels);
typedef ncclResult_t (*ncclTunerGetChunkSize_v6_t)(void* context, ncclFunc_t collType,
                                                   std::size_t nBytes, int algo, int proto,
                                                   int nChannels, std::size_t* chunkSize);

}  // extern "C"

// All versions begin so; up to v4 the last one is called `destroy`.
template <typename Init, typename GetCollInfo = ncclTunerGetCollInfo_v4_t>
struct ncclTuner {
  const char* name;
  Init init;
  GetCollInfo getCollInfo;
  ncclResult_t (*finalize)(void* context);
};

// NCCL 2.22 and 2.23, for a vendor's tuner alone, which 2.24 to 2.30 still take: AWS's aws-ofi-nccl
// has v3 and, since 2.30, v6.
using ncclTuner_v3_t = ncclTuner<ncclTunerInit_v4_t, ncclTunerGetCollInfo_v3_t>;
// NCCL 2.24 to 2.27 (v2.24.3-1 `src/include/nccl_tuner.h`).
using ncclTuner_v4_t = ncclTuner<ncclTunerInit_v4_t>;
// NCCL 2.28 and 2.29 (v2.28.3-1 `src/include/plugin/tuner/tuner_v5.h`).
using ncclTuner_v5_t = ncclTuner<ncclTunerInit_v5_t>;
// From NCCL 2.30 on (v2.30.3-1 `src/include/plugin/tuner/tuner_v6.h`). `getChunkSize` may be null.
struct ncclTuner_v6_t : ncclTuner_v5_t {
  ncclTunerGetChunkSize_v6_t getChunkSize;
};
static_assert(sizeof(ncclTuner_v6_t) == 5 * sizeof(void*), "NCCL's layout");

#define DYNAMICCL_EXPORT extern "C" __attribute__((visibility("default")))
