// See voter.h.
#include "tuner/voter.h"

#include <cstdio>

namespace dynamiccl {

Voter::Voter(const Request& vote, bool only_objects, std::uint64_t hello_limit_ms,
             std::uint64_t now_ms) noexcept
    : request_(vote),
      only_objects_(only_objects),
      send_at_ms_(now_ms),
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
  if (answer.kind == AnswerKind::kRetry) return hear_nothing(now_ms);
  if (!has_voted()) {
    if (answer.kind != AnswerKind::kWelcome || answer.incarnation == 0) return hear_nothing(now_ms);
    request_.kind = RequestKind::kVote;
    request_.incarnation = answer.incarnation;
    send_at_ms_ = now_ms;
    // One that only objects waits no longer for an answer than it would for a coordinator.
    if (!only_objects_) ends_at_ms_ = now_ms + 3 * limit_ms(request_.num_ranks);
    return;
  }
  // Another coordinator knows nothing of what this one may have told the others.
  if (answer.incarnation != request_.incarnation) return hear_nothing(now_ms);
  if (only_objects_) return abstain(answer.reason);
  switch (answer.kind) {
    case AnswerKind::kTable:
      outcome_ = Outcome::kTable;
      return;
    case AnswerKind::kAbstain:
      return abstain(answer.reason);
    case AnswerKind::kStillHere:
      request_.kind = RequestKind::kConfirm;
      request_.question = answer.question;
      send_at_ms_ = now_ms;
      return;
    case AnswerKind::kWait:
      request_.kind = RequestKind::kVote;
      request_.question = 0;
      send_at_ms_ = now_ms + answer.wait_ms;
      return;
    default:
      return hear_nothing(now_ms);
  }
}

void Voter::hear_nothing(std::uint64_t now_ms) noexcept {
  if (outcome_ != Outcome::kOpen) return;
  send_at_ms_ = now_ms + kRetryMs;
  look_at_clock(now_ms);
}

void Voter::look_at_clock(std::uint64_t now_ms) noexcept {
  if (outcome_ != Outcome::kOpen || now_ms < ends_at_ms_) return;
  if (!has_voted() || only_objects_) return abstain("no coordinator of the job answers");
  outcome_ = Outcome::kFailed;
  std::snprintf(reason_, sizeof reason_,
                "the coordinator was lost between votes and answers: whether the other ranks use "
                "the table is not known");
}

}  // namespace dynamiccl
