// The functions behind the structs that NCCL looks for in a tuner library, over one class of that
// library. NCCL's own names are used.
#pragma once

#include "identity/communicator.h"
#include "nccl/tuner_abi.h"
#include "table.h"

namespace dynamiccl {

inline constexpr char kName[] = "DynamICCL";

/// What NCCL passes to getCollInfo.
struct Question {
  /// From 2.31 on NCCL asks about symmetric kernels too, with `numPipeOps` 0 (2.31.0a7
  /// `src/scheduler/symmetric_sched.cc:158`, `src/tuning/tuning.cc`). A free cell would start one
  /// on buffers that are not registered: then nothing is written, and no call is counted.
  bool is_about_a_cell() const noexcept { return num_pipe_ops != 0; }

  int collective;
  std::size_t size_bytes;
  int num_pipe_ops;
  int reg_buff;  // can differ between the ranks of one call, so it must not matter to ours
  CostTable costs;
  int* num_channels;
};

/// `Tuner` has three static functions:
///
///   create(communicator, &context)                  leaves null where NCCL is on its own
///   answer(context, question), finalize(context)    not called with a null one
template <typename Tuner, ncclTunerGetChunkSize_v6_t getChunkSize = nullptr>
struct Shell {
  template <int version>
  static ncclResult_t init(void** context, std::uint64_t commId, std::size_t nRanks,
                           std::size_t nNodes, ncclDebugLogger_t logFunction,
                           ncclNvlDomainInfo_v5_t* nvlDomainInfo,
                           ncclTunerConstants_v5_t* constants) noexcept {
    if (context == nullptr) return ncclSuccess;
    *context = nullptr;
    return Tuner::create({nRanks, nNodes, logFunction, nvlDomainInfo, commId, version, constants},
                         context);
  }

  /// v4 does not tell the communicator's id.
  static ncclResult_t init_v4(std::size_t nRanks, std::size_t nNodes, ncclDebugLogger_t logFunction,
                              void** context) noexcept {
    return init<4>(context, 0, nRanks, nNodes, logFunction, nullptr, nullptr);
  }

  static ncclResult_t getCollInfo(void* context, ncclFunc_t collType, std::size_t nBytes,
                                  int numPipeOps, float** collCostTable, int numAlgo, int numProto,
                                  int regBuff, int* nChannels) noexcept {
    if (context == nullptr || collCostTable == nullptr || nChannels == nullptr) return ncclSuccess;
    // Typed float**, and yet one flat array.
    const CostTable costs = {reinterpret_cast<float*>(collCostTable), numAlgo, numProto};
    return Tuner::answer(context, {collType, nBytes, numPipeOps, regBuff, costs, nChannels});
  }

  static ncclResult_t finalize(void* context) noexcept {
    return context != nullptr ? Tuner::finalize(context) : ncclSuccess;
  }

  static constexpr ncclTuner_v4_t v4 = {kName, init_v4, getCollInfo, finalize};
  static constexpr ncclTuner_v5_t v5 = {kName, init<5>, getCollInfo, finalize};
  static constexpr ncclTuner_v6_t v6 = {{kName, init<6>, getCollInfo, finalize}, getChunkSize};
};

/// What a library exports: the arguments are those of `Shell`.
#define DYNAMICCL_EXPORT_TUNER(...)                                                  \
  DYNAMICCL_EXPORT const ncclTuner_v4_t ncclTunerPlugin_v4 = Shell<__VA_ARGS__>::v4; \
  DYNAMICCL_EXPORT const ncclTuner_v5_t ncclTunerPlugin_v5 = Shell<__VA_ARGS__>::v5; \
  DYNAMICCL_EXPORT const ncclTuner_v6_t ncclTunerPlugin_v6 = Shell<__VA_ARGS__>::v6;

}  // namespace dynamiccl
