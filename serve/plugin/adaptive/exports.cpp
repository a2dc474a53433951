// What NCCL sees of mode adaptive: one struct for each tuner ABI, over Switching (switching.h).
//
// Every function returns success, since any other value fails a collective or a communicator. The
// exceptions are an `init` and a call that heard nothing for the answer limit after they had
// confirmed (agree/ballot.h): other ranks may have another table, and this one cannot know.
#include <cstdio>
#include <cstring>

#include "adaptive/switching.h"
#include "identity/environment.h"
#include "nccl/tuner_abi.h"
#include "profiler/created.h"
#include "profiler/profiler.h"
#include "tuner/init.h"

namespace {

using namespace dynamiccl;

constexpr char kName[] = "DynamICCL";
/// All ranks of any communicator meet at the arbiter, where the leader is.
constexpr std::size_t kNotOnOneHost = 0;

/// What is made before the vote, since nothing that can fail may come after it.
struct Making {
  Switching::Begin begin;
  Switching* made = nullptr;

  static bool accept(void* user, const Exchange& exchange) {
    auto* making = static_cast<Making*>(user);
    making->begin.agreed = exchange.proposal;
    making->made = Switching::create(making->begin);
    return making->made != nullptr;
  }
};

/// This rank, as NCCL told our profiler just before.
bool identify(const Communicator& communicator, CreatedCommunicator* told) noexcept {
  return take_created(communicator.comm_id, told) && told->profiler != nullptr &&
         told->num_ranks == static_cast<std::int32_t>(communicator.num_ranks) &&
         told->num_nodes == static_cast<std::int32_t>(communicator.num_nodes);
}

Verdict agree(const Communicator& communicator, const Checked& checked,
              const CreatedCommunicator* told, Making* making,
              char (&reason)[kReasonBytes]) noexcept {
  Meeting meeting;
  const char* why_not = checked.reason_to_abstain;
  if (why_not == nullptr) why_not = find_meeting(kNotOnOneHost, &meeting);
  if (why_not != nullptr || meeting.by_word) {
    std::snprintf(reason, sizeof reason, "%s",
                  why_not != nullptr ? why_not : "mode adaptive needs the job's arbiter");
    return Verdict::kAbstain;
  }
  Prepared prepared;
  prepare(communicator, checked, "none", meeting, &prepared);
  prepared.vote.fields[7] += 1;  // other settings than mode table
  prepared.vote.has_stops = true;
  if (told == nullptr) {
    std::snprintf(prepared.problem, sizeof prepared.problem,
                  "NCCL_PROFILER_PLUGIN does not name this library too: mode adaptive needs what "
                  "NCCL tells a profiler alone");
    std::memcpy(prepared.vote.problem, prepared.problem, sizeof prepared.vote.problem - 1);
  } else {
    making->begin = {communicator,   checked.nccl_version, told->rank,
                     told->profiler, meeting.job,          meeting.arbiter,
                     meeting.key,    prepared.table,       {}};
  }
  making->begin.communicator.domains = nullptr;  // NCCL's, of the moment
  Exchange exchange;
  exchange.accepts = Making::accept;
  exchange.user = making;
  const Verdict verdict = vote_by_arbiter(meeting, prepared.vote, reason, &exchange);
  if (prepared.problem[0] != '\0') std::snprintf(reason, sizeof reason, "%s", prepared.problem);
  return verdict;
}

/// v5, v6. The tuning constants are left unchanged.
ncclResult_t init(void** context, std::uint64_t commId, std::size_t nRanks, std::size_t nNodes,
                  ncclDebugLogger_t logFunction, ncclNvlDomainInfo_v5_t* nvlDomainInfo,
                  ncclTunerConstants_v5_t*) noexcept {
  if (context == nullptr) return ncclSuccess;
  *context = nullptr;
  const Communicator communicator = {nRanks, nNodes, logFunction, nvlDomainInfo, commId};
  CreatedCommunicator told;
  const bool is_told = identify(communicator, &told);        // first: it is taken whatever follows
  const Checked checked = check_communicator(communicator);  // so is its id, remembered
  if (checked.ids_repeat) Switching::end_voting_of_all();
  if (nRanks < 2 || is_one("DYNAMICCL_DISABLE")) return ncclSuccess;
  Making making;
  char reason[kReasonBytes] = "";
  const Verdict verdict = agree(communicator, checked, is_told ? &told : nullptr, &making, reason);
  if (verdict == Verdict::kTable) {
    *context = making.made;
  } else {
    Switching::retire(making.made);
  }
  return tell(communicator, verdict, reason);
}

/// Before NCCL 2.28 the profiler does not tell which questions were launched as calls, and calls
/// that a rank only simulates would make the ranks differ at a stop.
ncclResult_t init_before_v5(std::size_t nRanks, std::size_t nNodes, ncclDebugLogger_t logFunction,
                            void** context) noexcept {
  if (context != nullptr) *context = nullptr;
  say(logFunction, NCCL_LOG_INFO, nRanks, nNodes,
      "NCCL's own choice stands: mode adaptive needs NCCL 2.28 or later; mode table does not");
  return ncclSuccess;
}

/// `regBuff` can differ between the ranks of one call, so it must not matter.
ncclResult_t getCollInfo(void* context, ncclFunc_t collType, std::size_t nBytes, int numPipeOps,
                         float** collCostTable, int numAlgo, int numProto, int,
                         int* nChannels) noexcept {
  if (context == nullptr || collCostTable == nullptr || nChannels == nullptr) return ncclSuccess;
  if (!is_about_a_cell(numPipeOps)) return ncclSuccess;
  // Typed float**, and yet one flat array.
  const CostTable costs = {reinterpret_cast<float*>(collCostTable), numAlgo, numProto};
  return static_cast<Switching*>(context)->answer(collType, nBytes, costs, nChannels);
}

ncclResult_t getCollInfo_v3(void*, ncclFunc_t, std::size_t, int, float**, int, int, int*) noexcept {
  return ncclSuccess;
}
ncclResult_t getCollInfo_v2(void*, ncclFunc_t, std::size_t, int, int, int, int*, int*,
                            int*) noexcept {
  return ncclSuccess;
}

ncclResult_t finalize(void* context) noexcept {
  Switching::retire(static_cast<Switching*>(context));
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
