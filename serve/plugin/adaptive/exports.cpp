// What NCCL sees of mode adaptive, over Switching (switching.h).
//
// Every function returns success, since any other value fails a collective or a communicator. The
// exceptions are an `init` and a call that heard nothing for the answer limit after they had
// confirmed (agree/ballot.h): other ranks may have another table, and this one cannot know.
#include <cstdio>

#include "adaptive/switching.h"
#include "nccl/tuner_shell.h"
#include "profiler/created.h"
#include "profiler/profiler.h"
#include "tuner/init.h"

namespace {

using namespace dynamiccl;

/// What is made before the vote ends, since nothing that can fail may come after it.
struct Making {
  Joining* joining;
  const CreatedCommunicator& told;
  Switching* made = nullptr;

  static bool accept(void* user, const Exchange& exchange) {
    auto* making = static_cast<Making*>(user);
    const Joining& joining = *making->joining;
    Switching::Begin begin = {joining.communicator,   joining.checked.nccl_version,
                              making->told.rank,      making->told.profiler,
                              joining.vote.round.job, joining.arbiter,
                              joining.table,          exchange.proposal};
    begin.communicator.domains = nullptr;  // NCCL's, of the moment
    making->made = Switching::create(begin);
    return making->made != nullptr;
  }
};

/// This rank, as NCCL told our profiler just before.
bool identify(const Communicator& communicator, CreatedCommunicator* told) noexcept {
  return take_created(communicator.comm_id, told) && told->profiler != nullptr &&
         told->num_ranks == static_cast<std::int32_t>(communicator.num_ranks) &&
         told->num_nodes == static_cast<std::int32_t>(communicator.num_nodes);
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
    Joining joining = {communicator, checked, "none", true};
    if (!is_told) {
      std::snprintf(joining.problem, sizeof joining.problem,
                    "NCCL_PROFILER_PLUGIN does not name this library too: mode adaptive needs what "
                    "NCCL tells a profiler alone");
    }
    Making making = {&joining, told};
    joining.exchange.accepts = Making::accept;
    joining.exchange.user = &making;
    const ncclResult_t result = agree_in_init(&joining);
    const bool is_agreed = joining.verdict == Verdict::kTable;
    if (is_agreed) *context = making.made;
    if (!is_agreed) Switching::retire(making.made);
    return result;
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
