// What NCCL sees of mode adaptive, over Switching (switching.h).
//
// Every function returns success, since any other value fails a collective or a communicator. The
// exceptions are an `init` and a call that heard nothing for the answer limit after they had
// confirmed (agree/ballot.h): other ranks may have another table, and this one cannot know.
#include <cstdio>
#include <cstring>

#include "adaptive/switching.h"
#include "identity/environment.h"
#include "nccl/tuner_shell.h"
#include "profiler/created.h"
#include "profiler/profiler.h"
#include "tuner/init.h"

namespace {

using namespace dynamiccl;

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

ncclResult_t agree(const Communicator& communicator, const Checked& checked,
                   const CreatedCommunicator* told, void** context) noexcept {
  Meeting meeting;
  const char* why_not = checked.reason_to_abstain;
  if (why_not == nullptr) why_not = find_meeting(kNotOnOneHost, &meeting);
  if (meeting.by_word) why_not = "mode adaptive needs the job's arbiter";
  if (why_not != nullptr) return tell(communicator, Verdict::kAbstain, why_not);
  Prepared prepared;
  prepare(communicator, checked, "none", meeting, &prepared);
  prepared.vote.fields[7] += 1;  // other settings than mode table
  prepared.vote.has_stops = true;
  Making making;
  if (told == nullptr) {
    std::snprintf(prepared.problem, sizeof prepared.problem,
                  "NCCL_PROFILER_PLUGIN does not name this library too: mode adaptive needs what "
                  "NCCL tells a profiler alone");
    std::memcpy(prepared.vote.problem, prepared.problem, sizeof prepared.vote.problem - 1);
  } else {
    making.begin = {communicator, checked.nccl_version, told->rank,     told->profiler,
                    meeting.job,  meeting.arbiter,      prepared.table, {}};
  }
  making.begin.communicator.domains = nullptr;  // NCCL's, of the moment
  Exchange exchange;
  exchange.accepts = Making::accept;
  exchange.user = &making;
  const Verdict verdict = vote_in_init(meeting, prepared.vote, &exchange);
  if (verdict == Verdict::kTable) {
    *context = making.made;
  } else {
    Switching::retire(making.made);
  }
  return tell(communicator, verdict,
              prepared.problem[0] != '\0' ? prepared.problem : exchange.reply.reason);
}

struct AdaptiveTuner {
  /// The tuning constants are left unchanged.
  static ncclResult_t create(const Communicator& communicator, int abi_version,
                             ncclTunerConstants_v5_t*, void** context) noexcept {
    if (abi_version < 5) {
      // The profiler does not tell which questions were launched as calls, and calls that a rank
      // only simulates would make the ranks differ at a stop.
      say(communicator, NCCL_LOG_INFO,
          "NCCL's own choice stands: mode adaptive needs NCCL 2.28 or later; mode table does not");
      return ncclSuccess;
    }
    CreatedCommunicator told;
    const bool is_told = identify(communicator, &told);  // first: it is taken whatever follows
    const Checked checked = check_communicator(communicator);  // so is its id, remembered
    if (checked.ids_repeat) Switching::end_voting_of_all();
    if (communicator.num_ranks < 2 || is_one("DYNAMICCL_DISABLE")) return ncclSuccess;
    return agree(communicator, checked, is_told ? &told : nullptr, context);
  }

  static ncclResult_t answer(void* context, const Question& question) noexcept {
    if (!is_about_a_cell(question.num_pipe_ops)) return ncclSuccess;
    return static_cast<Switching*>(context)->answer(question.collective, question.size_bytes,
                                                    question.costs, question.num_channels);
  }

  static ncclResult_t finalize(void* context) noexcept {
    Switching::retire(static_cast<Switching*>(context));
    return ncclSuccess;
  }
};

}  // namespace

const ncclTuner_v4_t ncclTunerPlugin_v4 = Shell<AdaptiveTuner>::v4;
const ncclTuner_v5_t ncclTunerPlugin_v5 = Shell<AdaptiveTuner>::v5;
// No chunk size: a rank that simulates a group (ncclGroupSimulateEnd) would have NCCL's at its next
// call, and the others ours.
const ncclTuner_v6_t ncclTunerPlugin_v6 = Shell<AdaptiveTuner>::v6;
