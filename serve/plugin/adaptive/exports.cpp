// What NCCL sees of the tuner: one struct for each ABI version, thin shells over Context.
//
// Here, and in nccl/tuner_abi.h, NCCL's own names are used. Every function returns ncclSuccess
// whatever happens: any other value fails the collective or the communicator. The exception is
// getCollInfo after the ranks' agreement broke down in the middle of a switch, where going on could
// hang the job (agreement/rules.h).
#include "adaptive/context.h"
#include "nccl/tuner_abi.h"

namespace {

using dynamiccl::Context;
using dynamiccl::CostTable;

constexpr char kName[] = "DynamICCL";

/// Before NCCL 2.28 the profiler does not tell which questions were launched as calls, and calls
/// that a rank only simulates would make the ranks differ at a switch.
ncclResult_t init_before_v5(std::size_t nRanks, std::size_t nNodes, ncclDebugLogger_t logFunction,
                            void** context) noexcept {
  if (context != nullptr) *context = nullptr;
  Context::abstain({nRanks, nNodes, logFunction},
                   "mode adaptive needs NCCL 2.28 or later; mode table needs none");
  return ncclSuccess;
}

/// v5, v6. The tuning constants are left unchanged.
ncclResult_t init(void** context, std::uint64_t commId, std::size_t nRanks, std::size_t nNodes,
                  ncclDebugLogger_t logFunction, ncclNvlDomainInfo_v5_t* nvlDomainInfo,
                  ncclTunerConstants_v5_t*) noexcept {
  if (context == nullptr) return ncclSuccess;
  *context = Context::create({nRanks, nNodes, logFunction, nvlDomainInfo, commId});
  return ncclSuccess;
}

/// `regBuff` can differ between the ranks of one call, so it must not matter.
ncclResult_t getCollInfo(void* context, ncclFunc_t collType, std::size_t nBytes, int numPipeOps,
                         float** collCostTable, int numAlgo, int numProto, int,
                         int* nChannels) noexcept {
  if (context == nullptr || collCostTable == nullptr || nChannels == nullptr) return ncclSuccess;
  if (!dynamiccl::is_about_a_cell(numPipeOps)) return ncclSuccess;
  // Typed float**, and yet one flat array.
  const CostTable costs = {reinterpret_cast<float*>(collCostTable), numAlgo, numProto};
  return static_cast<Context*>(context)->answer(collType, nBytes, costs, nChannels);
}

ncclResult_t getCollInfo_v3(void*, ncclFunc_t, std::size_t, int, float**, int, int, int*) noexcept {
  return ncclSuccess;
}
ncclResult_t getCollInfo_v2(void*, ncclFunc_t, std::size_t, int, int, int, int*, int*,
                            int*) noexcept {
  return ncclSuccess;
}

ncclResult_t finalize(void* context) noexcept {
  Context::retire(static_cast<Context*>(context));
  return ncclSuccess;
}

}  // namespace

const ncclTuner_v2_t ncclTunerPlugin_v2 = {kName, init_before_v5, getCollInfo_v2, finalize};
const ncclTuner_v3_t ncclTunerPlugin_v3 = {kName, init_before_v5, getCollInfo_v3, finalize};
const ncclTuner_v4_t ncclTunerPlugin_v4 = {kName, init_before_v5, getCollInfo, finalize};
const ncclTuner_v5_t ncclTunerPlugin_v5 = {kName, init, getCollInfo, finalize};
// No chunk size: a rank that simulates a group (ncclGroupSimulateEnd) would have NCCL's at its next
// call, and the others ours.
const ncclTuner_v6_t ncclTunerPlugin_v6 = {kName, init, getCollInfo, finalize, nullptr};
