// What NCCL sees: one struct per tuner ABI version, each a thin shell over Context.
//
// Here, and in nccl/tuner_abi.h, NCCL's own names are used. Every function returns ncclSuccess
// whatever happens: any other value fails the collective or the communicator. The exceptions:
// getCollInfo after the ranks' agreement broke down in the middle of a switch, where going on could
// hang the job (agreement/rules.h); and whatever a next tuner returns (next/tuner.h).
#include "nccl/tuner_exports.h"
#include "next/tuner.h"
#include "tuner.h"

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

/// v4 to v6. `regBuff` can differ between the ranks of one call, so it must not matter to ours.
ncclResult_t getCollInfo(void* context, ncclFunc_t collType, std::size_t nBytes, int numPipeOps,
                         float** collCostTable, int numAlgo, int numProto, int regBuff,
                         int* nChannels) noexcept {
  if (context == nullptr || collCostTable == nullptr || nChannels == nullptr) return ncclSuccess;
  // Typed float**, and yet one flat array.
  const CostTable costs = {reinterpret_cast<float*>(collCostTable), numAlgo, numProto};
  if (TunerLink* link = TunerLink::of(context)) {
    return link->answer(
        {collType, nBytes, numPipeOps, regBuff, costs, 0, 0, nullptr, nullptr, nChannels});
  }
  return static_cast<Context*>(context)->answer(collType, nBytes, costs, nChannels);
}

ncclResult_t getCollInfo_v3(void* context, ncclFunc_t collType, std::size_t nBytes, int numPipeOps,
                            float** collCostTable, int numAlgo, int numProto,
                            int* nChannels) noexcept {
  return getCollInfo(context, collType, nBytes, numPipeOps, collCostTable, numAlgo, numProto, 0,
                     nChannels);
}

/// v6. Ours asks for no chunk size, since a rank that simulates a group (ncclGroupSimulateEnd)
/// would have NCCL's at its next call, and the others ours; a next tuner may.
ncclResult_t getChunkSize(void* context, ncclFunc_t collType, std::size_t nBytes, int algo,
                          int proto, int nChannels, std::size_t* chunkSize) noexcept {
  if (context == nullptr || chunkSize == nullptr) return ncclSuccess;
  if (TunerLink* link = TunerLink::of(context)) {
    return link->answer_chunk(collType, nBytes, algo, proto, nChannels, chunkSize);
  }
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
const ncclTuner_v4_t ncclTunerPlugin_v4 = {kName, init<4>, getCollInfo, finalize};
const ncclTuner_v5_t ncclTunerPlugin_v5 = {kName, initWithDomains<5>, getCollInfo, finalize};
const ncclTuner_v6_t ncclTunerPlugin_v6 = {kName, initWithDomains<6>, getCollInfo, finalize,
                                           getChunkSize};
