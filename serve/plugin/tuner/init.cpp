// Implementation of init.h. Nothing that can fail comes after the vote.
#include "tuner/init.h"

#include <sched.h>

#include <cstring>

#include "agree/word.h"
#include "identity/environment.h"
#include "platform/clock.h"

namespace dynamiccl {
namespace {

/// How often this process has waited in vain, up to 2.
std::atomic<unsigned> g_in_vain{0};

/// Of a vote limit, how long to wait for others: all of it (10 s) once a process, then a tenth of
/// it, then a hundredth. Where hosts share no /dev/shm, or a rank has no plugin, each communicator
/// of a job would wait otherwise.
constexpr std::uint64_t kDivisors[] = {1, 10, 100};

/// What several ranks of a process wait for at once counts once.
void note(unsigned before, bool has_table, bool in_vain) noexcept {
  if (in_vain && before < 2) g_in_vain.compare_exchange_strong(before, before + 1);
  // Whose others came may have to wait for them again, but not as long as the first time.
  if (has_table && before == 2) g_in_vain.compare_exchange_strong(before, 1);
}

}  // namespace

Verdict vote_in_init(const Meeting& meeting, const Vote& vote, Exchange* exchange) noexcept {
  const unsigned before = g_in_vain.load();
  Limits limits = limits_of_job();
  const std::uint64_t wait_ms = limits.vote_ms / kDivisors[before];
  bool in_vain = false;
  Verdict verdict = Verdict::kAbstain;
  if (meeting.by_word) {
    char (&reason)[sizeof exchange->reply.reason] = exchange->reply.reason;
    if (agree_by_word(vote, wait_ms + vote.num_ranks, &in_vain, reason, sizeof reason)) {
      verdict = Verdict::kTable;
    }
  } else {
    if (before > 0) {
      // A ballot waits for two vote limits before it confirms. What it no longer waits then is
      // added to the answer limit, which must not be shorter than the arbiter's.
      limits.answer_ms += 2 * (limits.vote_ms - wait_ms / 2);
      limits.vote_ms = wait_ms / 2;
    }
    const std::uint64_t from_ms = monotonic_ms();
    verdict = agree_by_arbiter(meeting.arbiter, vote, limits, wait_ms, exchange);
    in_vain = verdict != Verdict::kTable && monotonic_ms() - from_ms >= wait_ms / 2;
  }
  note(before, verdict == Verdict::kTable, in_vain);
  return verdict;
}

ncclResult_t tell(const Communicator& communicator, Verdict verdict, const char* reason) noexcept {
  if (verdict == Verdict::kTable) {
    say(communicator, NCCL_LOG_INFO, "the artifact's table, from call 0");
    return ncclSuccess;
  }
  if (verdict == Verdict::kAbstain) {
    say(communicator, NCCL_LOG_INFO, "NCCL's own choice stands: %s", reason);
    return ncclSuccess;
  }
  say(communicator, NCCL_LOG_WARN, "this communicator must not be used: %s", reason);
  // NCCL bound this thread to the GPU's processors, and does not undo that when `init` fails
  // (2.30.7 `init.cc:1641,1703`). The earlier mask is not known: use all processors of the job.
  cpu_set_t all;
  std::memset(&all, 0xff, sizeof all);
  sched_setaffinity(0, sizeof all, &all);
  return ncclRemoteError;
}

ncclResult_t init_communicator(const Communicator& communicator, const char* asked_first,
                               const DecisionTable** table) noexcept {
  *table = nullptr;
  const Checked checked = check_communicator(communicator);  // whatever follows
  if (communicator.num_ranks < 2 || is_one("DYNAMICCL_DISABLE")) return ncclSuccess;
  Meeting meeting;
  const char* why_not = checked.reason_to_abstain;
  if (why_not == nullptr) why_not = find_meeting(communicator.num_nodes, &meeting);
  if (why_not != nullptr) return tell(communicator, Verdict::kAbstain, why_not);
  Prepared prepared;
  prepare(communicator, checked, asked_first, meeting, &prepared);
  Exchange exchange;
  const Verdict verdict = vote_in_init(meeting, prepared.vote, &exchange);
  if (verdict == Verdict::kTable) *table = prepared.table;
  return tell(communicator, verdict,
              prepared.problem[0] != '\0' ? prepared.problem : exchange.reply.reason);
}

}  // namespace dynamiccl
