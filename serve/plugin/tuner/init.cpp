// Implementation of init.h. Nothing that can fail comes after the vote.
#include "tuner/init.h"

#include <sched.h>

#include <atomic>
#include <cstdio>
#include <cstring>

#include "agree/word_file.h"
#include "identity/environment.h"
#include "platform/clock.h"

namespace dynamiccl {
namespace {

constexpr std::uint64_t kNsPerMs = 1'000'000;

/// How often this process has waited in vain, up to 2.
std::atomic<unsigned> g_in_vain{0};

/// How long to wait for others: 10 s once a process, then 1 s, then 0.1 s. Where hosts share no
/// /dev/shm, or a rank has no plugin, each communicator of a job would wait otherwise.
std::uint64_t wait_ms(const Limits& limits, unsigned in_vain_before) noexcept {
  static constexpr std::uint64_t kDivisors[] = {1, 10, 100};
  return limits.vote_ms / kDivisors[in_vain_before];
}

/// What several ranks of a process wait for at once counts once.
void note(unsigned before, bool has_table, bool in_vain) noexcept {
  if (in_vain && before < 2) g_in_vain.compare_exchange_strong(before, before + 1);
  // Whose others came may have to wait for them again, but not as long as the first time.
  if (has_table && before == 2) g_in_vain.compare_exchange_strong(before, 1);
}

Verdict vote_by_word(const Vote& vote, char (&reason)[kReasonBytes]) noexcept {
  const unsigned before = g_in_vain.load();
  Limits limits = limits_of_job();
  limits.vote_ms = wait_ms(limits, before);
  bool in_vain = false;
  const bool has_table =
      agree_by_word(vote, vote_limit_ms(limits, vote.num_ranks), &in_vain, reason, sizeof reason);
  note(before, has_table, in_vain);
  return has_table ? Verdict::kTable : Verdict::kAbstain;
}

}  // namespace

Verdict vote_by_arbiter(const Meeting& meeting, const Vote& vote, char (&reason)[kReasonBytes],
                        Exchange* exchange) noexcept {
  const unsigned before = g_in_vain.load();
  Limits limits = limits_of_job();
  const std::uint64_t patience_ms = wait_ms(limits, before);
  if (patience_ms < limits.vote_ms) {
    // A ballot waits for two vote limits before it confirms. What it no longer waits then is added
    // to the answer limit, which must not be shorter than the arbiter's.
    const std::uint64_t shorter_ms = patience_ms / 2;
    limits.answer_ms += 2 * (limits.vote_ms - shorter_ms);
    limits.vote_ms = shorter_ms;
  }
  Reply reply;
  const std::uint64_t from_ns = monotonic_ns();
  const Verdict verdict =
      agree_by_arbiter(meeting.arbiter, meeting.key, vote, limits, patience_ms, &reply, exchange);
  const bool was_long = monotonic_ns() - from_ns >= patience_ms * kNsPerMs / 2;
  note(before, verdict == Verdict::kTable, verdict != Verdict::kTable && was_long);
  std::snprintf(reason, sizeof reason, "%s", reply.reason);
  return verdict;
}

namespace {

Verdict agree(const Communicator& communicator, const Checked& checked, const char* asked_first,
              const DecisionTable** table, char (&reason)[kReasonBytes]) noexcept {
  Meeting meeting;
  const char* why_not = checked.reason_to_abstain;
  if (why_not == nullptr) why_not = find_meeting(communicator.num_nodes, &meeting);
  if (why_not != nullptr) {
    std::snprintf(reason, sizeof reason, "%s", why_not);
    return Verdict::kAbstain;
  }
  Prepared prepared;
  prepare(communicator, checked, asked_first, meeting, &prepared);
  const Verdict verdict = meeting.by_word
                              ? vote_by_word(prepared.vote, reason)
                              : vote_by_arbiter(meeting, prepared.vote, reason, nullptr);
  if (verdict == Verdict::kTable) *table = prepared.table;
  if (prepared.problem[0] != '\0') std::snprintf(reason, sizeof reason, "%s", prepared.problem);
  return verdict;
}

}  // namespace

void say(ncclDebugLogger_t logger, ncclDebugLogLevel level, std::size_t num_ranks,
         std::size_t num_nodes, const char* text) noexcept {
  if (logger == nullptr) return;
  char line[kReasonBytes + 160];
  std::snprintf(line, sizeof line, "DYNAMICCL: %zu ranks on %zu nodes: %s", num_ranks, num_nodes,
                text);
  logger(level, NCCL_INIT | NCCL_TUNING, "dynamiccl", __LINE__, "%s", line);
}

ncclResult_t tell(const Communicator& communicator, Verdict verdict, const char* reason) noexcept {
  const std::size_t num_ranks = communicator.num_ranks, num_nodes = communicator.num_nodes;
  if (verdict == Verdict::kTable) {
    say(communicator.logger, NCCL_LOG_INFO, num_ranks, num_nodes,
        "the artifact's table, from call 0");
    return ncclSuccess;
  }
  const bool failed = verdict == Verdict::kFailed;
  char text[kReasonBytes + 64];
  std::snprintf(text, sizeof text, "%s: %s",
                failed ? "this communicator must not be used" : "NCCL's own choice stands", reason);
  say(communicator.logger, failed ? NCCL_LOG_WARN : NCCL_LOG_INFO, num_ranks, num_nodes, text);
  if (!failed) return ncclSuccess;
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
  char reason[kReasonBytes] = "";
  return tell(communicator, agree(communicator, checked, asked_first, table, reason), reason);
}

}  // namespace dynamiccl
