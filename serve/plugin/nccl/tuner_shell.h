// The functions behind the structs that NCCL looks for in a tuner library, over one class of that
// library. Here, and in tuner_abi.h, NCCL's own names are used.
#pragma once

#include "choice.h"
#include "identity/communicator.h"
#include "nccl/tuner_abi.h"

namespace dynamiccl {

inline constexpr char kName[] = "DynamICCL";

/// What NCCL passes to getCollInfo from v3 on.
struct Question {
  int collective;
  std::size_t size_bytes;
  int num_pipe_ops;  // see is_about_a_cell
  int reg_buff;      // can differ between the ranks of one call, so it must not matter to ours
  CostTable costs;
  int* num_channels;
};

/// `Tuner` has three static functions:
///
///   create(communicator, abi_version, constants, &context)    leaves null where NCCL is on its own
///   answer(context, question), finalize(context)              not called with a null one
template <typename Tuner>
struct Shell {
  /// v2, v3 and v4 do not tell the communicator's id.
  template <int version>
  static ncclResult_t init(std::size_t nRanks, std::size_t nNodes, ncclDebugLogger_t logFunction,
                           void** context) noexcept {
    return initWithId<version>(context, 0, nRanks, nNodes, logFunction, nullptr, nullptr);
  }

  template <int version>
  static ncclResult_t initWithId(void** context, std::uint64_t commId, std::size_t nRanks,
                                 std::size_t nNodes, ncclDebugLogger_t logFunction,
                                 ncclNvlDomainInfo_v5_t* nvlDomainInfo,
                                 ncclTunerConstants_v5_t* constants) noexcept {
    if (context == nullptr) return ncclSuccess;
    *context = nullptr;
    return Tuner::create({nRanks, nNodes, logFunction, nvlDomainInfo, commId}, version, constants,
                         context);
  }

  /// NCCL 2.21 passes no cost table, so available cells are unknown: it keeps its own choice.
  static ncclResult_t getCollInfo_v2(void*, ncclFunc_t, std::size_t, int, int, int, int*, int*,
                                     int*) noexcept {
    return ncclSuccess;
  }

  static ncclResult_t getCollInfo_v3(void* context, ncclFunc_t collType, std::size_t nBytes,
                                     int numPipeOps, float** collCostTable, int numAlgo,
                                     int numProto, int* nChannels) noexcept {
    return getCollInfo(context, collType, nBytes, numPipeOps, collCostTable, numAlgo, numProto, 0,
                       nChannels);
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

  static constexpr ncclTuner_v2_t v2 = {kName, init<2>, getCollInfo_v2, finalize};
  static constexpr ncclTuner_v3_t v3 = {kName, init<3>, getCollInfo_v3, finalize};
  static constexpr ncclTuner_v4_t v4 = {kName, init<4>, getCollInfo, finalize};
  static constexpr ncclTuner_v5_t v5 = {kName, initWithId<5>, getCollInfo, finalize};
  static constexpr ncclTuner_v6_t v6 = {kName, initWithId<6>, getCollInfo, finalize, nullptr};
};

}  // namespace dynamiccl
