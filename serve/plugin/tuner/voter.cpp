// Implementation of voter.h.
#include "tuner/voter.h"

#include <cstdio>

namespace dynamiccl {
namespace {

/// A round takes at most one limit, and another one if its coordinator is replaced.
constexpr std::uint64_t kLimitsToAbstain = 2;
constexpr std::uint64_t kLimitsToFailure = 3;
constexpr int kLeastInVain = 3;
constexpr std::uint64_t kLeastPatienceMs = 100, kMostPatienceMs = 2'000;

}  // namespace

Voter::Voter(const Request& vote, bool only_objects, std::uint64_t hello_limit_ms,
             std::uint64_t now_ms) noexcept
    : request_(vote),
      only_objects_(only_objects),
      send_at_ms_(now_ms),
      silent_until_ms_(now_ms + hello_limit_ms),
      ends_at_ms_(now_ms + hello_limit_ms) {
  request_.kind = RequestKind::kHello;
  request_.incarnation = 0;
  request_.question = 0;
}

void Voter::abstain(const char* reason) noexcept {
  outcome_ = Outcome::kAbstain;
  std::snprintf(reason_, sizeof reason_, "%s", reason);
}

void Voter::hear(const Answer& answer, std::uint64_t now_ms) noexcept {
  if (outcome_ != Outcome::kOpen) return;
  if (answer.kind == AnswerKind::kRetry) {
    // From another coordinator: the one that has the vote is gone, and has given nobody the table.
    if (has_voted() && !has_confirmed() && answer.incarnation != request_.incarnation) {
      request_.kind = RequestKind::kHello;
      request_.incarnation = 0;
    }
    return hear_nothing(now_ms);
  }
  if (!has_voted()) {
    if (answer.kind != AnswerKind::kWelcome || answer.incarnation == 0) return hear_nothing(now_ms);
    request_.kind = RequestKind::kVote;
    request_.incarnation = answer.incarnation;
    send_at_ms_ = now_ms;
    if (only_objects_) return;  // it waits no longer for an answer than for a coordinator
    silent_until_ms_ = now_ms + limit_ms(request_.num_ranks) / 2;
    if (!has_ever_voted_) ends_at_ms_ = now_ms + kLimitsToAbstain * limit_ms(request_.num_ranks);
    has_ever_voted_ = true;
    return;
  }
  // A new coordinator does not know what the previous one may have sent to other ranks.
  if (answer.incarnation != request_.incarnation) return hear_nothing(now_ms);
  if (only_objects_) return abstain(answer.reason);
  // Also valid when late: decisions are final, and sent to every rank that confirmed.
  if (answer.kind == AnswerKind::kTable && has_confirmed()) {
    outcome_ = Outcome::kTable;
    return;
  }
  if (answer.kind == AnswerKind::kAbstain) return abstain(answer.reason);
  if (now_ms >= ends_at_ms_) return hear_nothing(now_ms);
  num_in_vain_ = 0;
  silent_until_ms_ = now_ms + limit_ms(request_.num_ranks) / 2;
  if (answer.kind == AnswerKind::kStillHere) {
    if (!has_confirmed()) ends_at_ms_ = now_ms + kLimitsToFailure * limit_ms(request_.num_ranks);
    request_.kind = RequestKind::kConfirm;
    request_.question = answer.question;
    send_at_ms_ = now_ms;
  } else {
    send_at_ms_ = now_ms + answer.wait_ms;
  }
}

void Voter::hear_nothing(std::uint64_t now_ms) noexcept {
  if (outcome_ != Outcome::kOpen) return;
  ++num_in_vain_;
  send_at_ms_ = now_ms + kRetryMs;
  look_at_clock(now_ms);
}

void Voter::look_at_clock(std::uint64_t now_ms) noexcept {
  if (outcome_ != Outcome::kOpen) return;
  if (!has_confirmed()) {
    if (now_ms < silent_until_ms_ && now_ms < ends_at_ms_) return;
    return abstain(has_voted() ? "the coordinator stopped answering before all ranks had confirmed"
                               : "no coordinator of the job answers");
  }
  // Elapsed time alone does not count: a rank that was suspended sent nothing meanwhile.
  if (now_ms < ends_at_ms_ || num_in_vain_ < kLeastInVain) return;
  outcome_ = Outcome::kFailed;
  std::snprintf(reason_, sizeof reason_,
                "this rank had confirmed, and then the coordinator was lost: whether the other "
                "ranks use the table is not known");
}

std::uint64_t Voter::patience_ms(std::uint64_t now_ms) const noexcept {
  const std::uint64_t until_ms = has_confirmed() ? ends_at_ms_ : silent_until_ms_;
  if (until_ms >= now_ms + kMostPatienceMs) return kMostPatienceMs;
  return until_ms > now_ms + kLeastPatienceMs ? until_ms - now_ms : kLeastPatienceMs;
}

}  // namespace dynamiccl
