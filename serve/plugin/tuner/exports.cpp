// What NCCL sees: one struct for each tuner ABI, and a profiler that only listens for a name.
//
// `init` agrees with the other ranks, once; the context is then the table, or null where NCCL's own
// choice stands. After that nothing runs but look-ups. Every function returns success, since any
// other value fails a collective or a communicator; the exception is an `init` whose coordinator
// was lost after its vote (voter.h), where some ranks may have the table and this one cannot know.
#include <sched.h>

#include <cstdio>
#include <cstring>

#include "choice.h"
#include "identity/environment.h"
#include "nccl/profiler_abi.h"
#include "nccl/tuner_exports.h"
#include "platform/dynamic.h"
#include "platform/threads.h"
#include "tuner/agree.h"

extern "C" {
extern DYNAMICCL_EXPORT const ncclProfiler_v4_t ncclProfiler_v4;
}

namespace {

using namespace dynamiccl;

constexpr char kName[] = "DynamICCL";

/// What the profiler of this thread was told last (NCCL 2.27; see profilerInit).
struct Told {
  std::uint64_t comm_id;
  int num_ranks, num_nodes;
};
thread_local Told t_told = {0, 0, 0};

void say(ncclDebugLogger_t logger, ncclDebugLogLevel level, std::size_t num_ranks,
         std::size_t num_nodes, const char* text) noexcept {
  if (logger == nullptr) return;
  char line[kMaxReasonBytes + 128];
  std::snprintf(line, sizeof line, "DYNAMICCL: %zu ranks on %zu nodes: %s", num_ranks, num_nodes,
                text);
  logger(level, NCCL_INIT | NCCL_TUNING, "dynamiccl", __LINE__, "%s", line);
}

ncclResult_t create(std::size_t num_ranks, std::size_t num_nodes, std::uint64_t comm_id,
                    const ncclNvlDomainInfo_v5_t* domains, ncclDebugLogger_t logger,
                    void** context) noexcept {
  if (context == nullptr) return ncclSuccess;
  *context = nullptr;
  if (num_ranks < 2 || in_forked_child() || is_one("DYNAMICCL_DISABLE")) return ncclSuccess;
  const bool is_even =
      domains == nullptr || domains->minRanksPerNvlDomain == domains->maxRanksPerNvlDomain;
  Agreed agreed;
  agree({num_ranks, num_nodes, comm_id, loaded_nccl_version(), is_even}, &agreed);
  char text[kMaxReasonBytes + 64];
  if (agreed.outcome == Outcome::kTable) {
    *context = const_cast<DecisionTable*>(agreed.table);
    say(logger, NCCL_LOG_INFO, num_ranks, num_nodes, "the artifact's table, from call 0");
    return ncclSuccess;
  }
  const bool failed = agreed.outcome == Outcome::kFailed;
  std::snprintf(text, sizeof text, "%s: %s",
                failed ? "this communicator must not be used" : "NCCL's own choice stands",
                agreed.reason);
  say(logger, failed ? NCCL_LOG_WARN : NCCL_LOG_INFO, num_ranks, num_nodes, text);
  if (!failed) return ncclSuccess;
  // NCCL bound this thread to the GPU's processors, and does not undo it on its way out of an error
  // (2.30.7 `init.cc:1641,1703`). What it was before is not known: all that the job may use.
  cpu_set_t all;
  std::memset(&all, 0xff, sizeof all);
  sched_setaffinity(0, sizeof all, &all);
  return ncclRemoteError;
}

/// v3 and v4 are not told which communicator it is; the profiler of NCCL 2.27 is.
ncclResult_t init(std::size_t nRanks, std::size_t nNodes, ncclDebugLogger_t logFunction,
                  void** context) noexcept {
  const Told told = t_told;
  t_told = {0, 0, 0};
  const bool fits = static_cast<std::size_t>(told.num_ranks) == nRanks &&
                    static_cast<std::size_t>(told.num_nodes) == nNodes;
  return create(nRanks, nNodes, fits ? told.comm_id : 0, nullptr, logFunction, context);
}

ncclResult_t initWithId(void** context, std::uint64_t commId, std::size_t nRanks,
                        std::size_t nNodes, ncclDebugLogger_t logFunction,
                        ncclNvlDomainInfo_v5_t* nvlDomainInfo, ncclTunerConstants_v5_t*) noexcept {
  return create(nRanks, nNodes, commId, nvlDomainInfo, logFunction, context);
}

/// v4 and later. `regBuff` can differ between the ranks of one call, so it must not matter.
ncclResult_t getCollInfo(void* context, ncclFunc_t collType, std::size_t nBytes, int,
                         float** collCostTable, int numAlgo, int numProto, int,
                         int* nChannels) noexcept {
  if (context == nullptr || collCostTable == nullptr || nChannels == nullptr) return ncclSuccess;
  // RCCL has an eighth algorithm; NCCL before 2.23 had six.
  if (numProto != kNumProtocols || numAlgo < 1 || numAlgo > kNumAlgorithms) return ncclSuccess;
  const auto* table = static_cast<const DecisionTable*>(context);
  const Entry* entry = lookup(*table, collType, nBytes);
  if (entry == nullptr) return ncclSuccess;
  // Typed float**, and yet one flat array.
  const CostTable costs = {reinterpret_cast<float*>(collCostTable), numAlgo, numProto};
  choose(*entry, table->num_nodes, costs, nChannels);
  return ncclSuccess;
}

ncclResult_t getCollInfo_v3(void* context, ncclFunc_t collType, std::size_t nBytes, int numPipeOps,
                            float** collCostTable, int numAlgo, int numProto,
                            int* nChannels) noexcept {
  return getCollInfo(context, collType, nBytes, numPipeOps, collCostTable, numAlgo, numProto, 0,
                     nChannels);
}

/// NCCL 2.21 gives no cost table to see what is available by: it keeps its own choice.
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

/// Nothing to free: tables stay (tables.h).
ncclResult_t finalize(void*) noexcept { return ncclSuccess; }

/// The only thing that NCCL 2.27 tells about a communicator's id, just before the tuner's `init`
/// and on its thread. The mask stays empty, so that no event is ever made for us.
ncclResult_t profilerInit(void** context, int* eActivationMask, const char*, std::uint64_t commHash,
                          int nNodes, int nranks, int, ncclDebugLogger_t) noexcept {
  if (context != nullptr) *context = nullptr;
  if (eActivationMask != nullptr) *eActivationMask = 0;
  t_told = {commHash, nranks, nNodes};
  return ncclSuccess;
}
ncclResult_t startEvent(void*, void** eHandle, ncclProfilerEventDescr_v4_t*) noexcept {
  if (eHandle != nullptr) *eHandle = nullptr;
  return ncclSuccess;
}
ncclResult_t stopEvent(void*) noexcept { return ncclSuccess; }
ncclResult_t recordEventState(void*, ncclProfilerEventState_t,
                              ncclProfilerEventStateArgs_v4_t*) noexcept {
  return ncclSuccess;
}

}  // namespace

const ncclTuner_v2_t ncclTunerPlugin_v2 = {kName, init_v2, getCollInfo_v2, finalize};
const ncclTuner_v3_t ncclTunerPlugin_v3 = {kName, init, getCollInfo_v3, finalize};
const ncclTuner_v4_t ncclTunerPlugin_v4 = {kName, init, getCollInfo, finalize};
const ncclTuner_v5_t ncclTunerPlugin_v5 = {kName, initWithId, getCollInfo, finalize};
const ncclTuner_v6_t ncclTunerPlugin_v6 = {kName, initWithId, getCollInfo, finalize, nullptr};
const ncclProfiler_v4_t ncclProfiler_v4 = {kName,     profilerInit,     startEvent,
                                           stopEvent, recordEventState, finalize};
