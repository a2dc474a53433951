// What NCCL sees: one struct per tuner ABI version, each a thin shell over Context.
//
// Here, and in nccl/tuner_abi.h, NCCL's own names are used. Every function returns ncclSuccess
// whatever happens: any other value fails the collective or the communicator. The exceptions:
// `init` in sweep mode, which means to fail a benchmark that could only hang or mislead, and
// getCollInfo after the ranks' agreement broke down in the middle of a switch, where going on could
// hang the job (agreement/rules.h); and whatever a next tuner returns (next/tuner.h).
#include "nccl/tuner_abi.h"
#include "next/tuner.h"
#include "tuner.h"

#define DYNAMICCL_EXPORT __attribute__((visibility("default")))

extern "C" {
// `const` alone would give these internal linkage.
extern DYNAMICCL_EXPORT const ncclTuner_v2_t ncclTunerPlugin_v2;
extern DYNAMICCL_EXPORT const ncclTuner_v3_t ncclTunerPlugin_v3;
extern DYNAMICCL_EXPORT const ncclTuner_v4_t ncclTunerPlugin_v4;
extern DYNAMICCL_EXPORT const ncclTuner_v5_t ncclTunerPlugin_v5;
extern DYNAMICCL_EXPORT const ncclTuner_v6_t ncclTunerPlugin_v6;
}

namespace {

using dynamiccl::Communicator;
using dynamiccl::Context;
using dynamiccl::CostTable;
using dynamiccl::NextPlugin;
using dynamiccl::Question;
using dynamiccl::TunerLink;

constexpr char kName[] = "DynamICCL";

ncclResult_t create(const Communicator& communicator, void** context,
                    ncclNvlDomainInfo_v5_t* domains = nullptr,
                    ncclTunerConstants_v5_t* constants = nullptr) noexcept {
  if (context == nullptr) return ncclSuccess;
  const NextPlugin* next = TunerLink::find(communicator.abi_version, communicator.logger);
  if (next != nullptr) {
    return TunerLink::create(next, communicator, domains, constants, context);
  }
  Context* made = nullptr;
  const ncclResult_t result = Context::create(communicator, &made);
  *context = made;
  return result;
}

/// v2, v3, v4: the context comes last.
template <int version>
ncclResult_t init(std::size_t nRanks, std::size_t nNodes, ncclDebugLogger_t logFunction,
                  void** context) noexcept {
  return create({version, nRanks, nNodes, logFunction, nullptr}, context);
}

/// v5, v6: the context comes first; we leave the constants as NCCL made them.
template <int version>
ncclResult_t initWithDomains(void** context, std::uint64_t commId, std::size_t nRanks,
                             std::size_t nNodes, ncclDebugLogger_t logFunction,
                             ncclNvlDomainInfo_v5_t* nvlDomainInfo,
                             ncclTunerConstants_v5_t* constants) noexcept {
  return create({version, nRanks, nNodes, logFunction, nvlDomainInfo, commId}, context,
                nvlDomainInfo, constants);
}

ncclResult_t getCollInfo_v2(void* context, ncclFunc_t collType, std::size_t nBytes,
                            int collNetSupport, int nvlsSupport, int numPipeOps, int* algorithm,
                            int* protocol, int* nChannels) noexcept {
  if (context == nullptr || algorithm == nullptr || protocol == nullptr || nChannels == nullptr) {
    return ncclSuccess;
  }
  if (TunerLink* link = TunerLink::of(context)) {
    return link->answer_v2({collType,
                            nBytes,
                            numPipeOps,
                            0,
                            {nullptr, 0, 0},
                            collNetSupport,
                            nvlsSupport,
                            algorithm,
                            protocol,
                            nChannels});
  }
  return static_cast<Context*>(context)->answer_v2(collType, nBytes, nvlsSupport, algorithm,
                                                   protocol, nChannels);
}

inline void hold_apart() noexcept { __asm__ volatile(""); }

/// What is not usual: apart, so that the usual needs no frame.
__attribute__((noinline)) ncclResult_t getCollInfo_unusual(void* context, ncclFunc_t collType,
                                                           std::size_t nBytes, int numPipeOps,
                                                           float** collCostTable, int numAlgo,
                                                           int numProto, int regBuff,
                                                           int* nChannels) noexcept {
  if (context == nullptr || collCostTable == nullptr || nChannels == nullptr) return ncclSuccess;
  const CostTable costs = {reinterpret_cast<float*>(collCostTable), numAlgo, numProto};
  if (TunerLink* link = TunerLink::of(context)) {
    return link->answer(
        {collType, nBytes, numPipeOps, regBuff, costs, 0, 0, nullptr, nullptr, nChannels});
  }
  return static_cast<Context*>(context)->answer(collType, nBytes, costs, nChannels);
}

/// v4, v5 and, with chunks, v6. `regBuff` can differ between the ranks of one call, so it must not
/// matter to ours.
template <bool chunks>
ncclResult_t getCollInfo(void* context, ncclFunc_t collType, std::size_t nBytes, int numPipeOps,
                         float** collCostTable, int numAlgo, int numProto, int regBuff,
                         int* nChannels) noexcept {
  if (context == nullptr) return ncclSuccess;
  // Nested and held apart: gathered into one condition they would need registers, and so a frame.
  if (!TunerLink::is_one(context) && static_cast<Context*>(context)->has_fast_path()) {
    hold_apart();
    if (collCostTable != nullptr && numAlgo == dynamiccl::kNumAlgorithms) {
      hold_apart();
      if (nChannels != nullptr && numProto == dynamiccl::kNumProtocols) {
        auto* ours = static_cast<Context*>(context);
        // Typed float**, and yet one flat array.
        auto* cells = reinterpret_cast<float*>(collCostTable);
        return chunks ? ours->answer_fast_with_chunks(collType, nBytes, cells, nChannels)
                      : ours->answer_fast(collType, nBytes, cells, nChannels);
      }
    }
  }
  return getCollInfo_unusual(context, collType, nBytes, numPipeOps, collCostTable, numAlgo,
                             numProto, regBuff, nChannels);
}

ncclResult_t getCollInfo_v3(void* context, ncclFunc_t collType, std::size_t nBytes, int numPipeOps,
                            float** collCostTable, int numAlgo, int numProto,
                            int* nChannels) noexcept {
  return getCollInfo<false>(context, collType, nBytes, numPipeOps, collCostTable, numAlgo, numProto,
                            0, nChannels);
}

/// v6. `nBytes` and `nChannels` are of one part of a collective: nothing to find the whole by.
ncclResult_t getChunkSize(void* context, ncclFunc_t collType, std::size_t nBytes, int algo,
                          int proto, int nChannels, std::size_t* chunkSize) noexcept {
  if (context == nullptr || chunkSize == nullptr) return ncclSuccess;
  if (TunerLink* link = TunerLink::of(context)) {
    return link->answer_chunk(collType, nBytes, algo, proto, nChannels, chunkSize);
  }
  static_cast<Context*>(context)->answer_chunk(collType, algo, proto, chunkSize);
  return ncclSuccess;
}

ncclResult_t finalize(void* context) noexcept {
  if (TunerLink* link = TunerLink::of(context)) return TunerLink::retire(link);
  Context::retire(static_cast<Context*>(context));
  return ncclSuccess;
}

}  // namespace

const ncclTuner_v2_t ncclTunerPlugin_v2 = {kName, init<2>, getCollInfo_v2, finalize};
const ncclTuner_v3_t ncclTunerPlugin_v3 = {kName, init<3>, getCollInfo_v3, finalize};
const ncclTuner_v4_t ncclTunerPlugin_v4 = {kName, init<4>, getCollInfo<false>, finalize};
const ncclTuner_v5_t ncclTunerPlugin_v5 = {kName, initWithDomains<5>, getCollInfo<false>, finalize};
const ncclTuner_v6_t ncclTunerPlugin_v6 = {kName, initWithDomains<6>, getCollInfo<true>, finalize,
                                           getChunkSize};
