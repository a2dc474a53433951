// What NCCL sees: one struct for each tuner ABI, thin wrappers of init.h. The context is a pointer
// to the table, or null where NCCL's own choice stands.
#include "nccl/tuner_abi.h"
#include "tuner/init.h"

namespace {

using namespace dynamiccl;

constexpr char kName[] = "DynamICCL";

ncclResult_t create(std::size_t num_ranks, std::size_t num_nodes, std::uint64_t comm_id,
                    const ncclNvlDomainInfo_v5_t* domains, ncclDebugLogger_t logger,
                    void** context) noexcept {
  if (context == nullptr) return ncclSuccess;
  const DecisionTable* table = nullptr;
  const ncclResult_t result =
      init_communicator({num_ranks, num_nodes, logger, domains, comm_id}, "none", &table);
  *context = const_cast<DecisionTable*>(table);
  return result;
}

/// v3 and v4 do not tell the communicator's id; the profiler of NCCL 2.27 does.
ncclResult_t init(std::size_t nRanks, std::size_t nNodes, ncclDebugLogger_t logFunction,
                  void** context) noexcept {
  return create(nRanks, nNodes, take_comm_id(nRanks, nNodes), nullptr, logFunction, context);
}

ncclResult_t initWithId(void** context, std::uint64_t commId, std::size_t nRanks,
                        std::size_t nNodes, ncclDebugLogger_t logFunction,
                        ncclNvlDomainInfo_v5_t* nvlDomainInfo, ncclTunerConstants_v5_t*) noexcept {
  return create(nRanks, nNodes, commId, nvlDomainInfo, logFunction, context);
}

/// v4 and later. `regBuff` can differ between the ranks of one call, so it must not matter.
ncclResult_t getCollInfo(void* context, ncclFunc_t collType, std::size_t nBytes, int numPipeOps,
                         float** collCostTable, int numAlgo, int numProto, int,
                         int* nChannels) noexcept {
  if (context == nullptr || collCostTable == nullptr || nChannels == nullptr) return ncclSuccess;
  if (!is_about_a_cell(numPipeOps)) return ncclSuccess;
  // Typed float**, and yet one flat array.
  const CostTable costs = {reinterpret_cast<float*>(collCostTable), numAlgo, numProto};
  answer(*static_cast<const DecisionTable*>(context), collType, nBytes, costs, nChannels);
  return ncclSuccess;
}

ncclResult_t getCollInfo_v3(void* context, ncclFunc_t collType, std::size_t nBytes, int numPipeOps,
                            float** collCostTable, int numAlgo, int numProto,
                            int* nChannels) noexcept {
  return getCollInfo(context, collType, nBytes, numPipeOps, collCostTable, numAlgo, numProto, 0,
                     nChannels);
}

/// NCCL 2.21 passes no cost table, so available cells are unknown: it keeps its own choice.
ncclResult_t init_v2(std::size_t nRanks, std::size_t nNodes, ncclDebugLogger_t logFunction,
                     void** context) noexcept {
  if (context != nullptr) *context = nullptr;
  say(logFunction, NCCL_LOG_INFO, nRanks, nNodes,
      "NCCL's own choice stands: NCCL 2.21 has no cost table");
  return ncclSuccess;
}
ncclResult_t getCollInfo_v2(void*, ncclFunc_t, std::size_t, int, int, int, int*, int*,
                            int*) noexcept {
  return ncclSuccess;
}

/// Nothing to free: tables stay until the process ends.
ncclResult_t finalize(void*) noexcept { return ncclSuccess; }

}  // namespace

const ncclTuner_v2_t ncclTunerPlugin_v2 = {kName, init_v2, getCollInfo_v2, finalize};
const ncclTuner_v3_t ncclTunerPlugin_v3 = {kName, init, getCollInfo_v3, finalize};
const ncclTuner_v4_t ncclTunerPlugin_v4 = {kName, init, getCollInfo, finalize};
const ncclTuner_v5_t ncclTunerPlugin_v5 = {kName, initWithId, getCollInfo, finalize};
const ncclTuner_v6_t ncclTunerPlugin_v6 = {kName, initWithId, getCollInfo, finalize, nullptr};
