// Implementation of ballot.h.
#include "agree/ballot.h"

#include <algorithm>
#include <cstdio>

namespace dynamiccl {
namespace {

/// Pause before an arbiter that does not listen yet is tried again.
constexpr std::uint64_t kRetryMs = 20;
/// The arbiter ends a round one limit after its first vote; twice that is patience enough.
constexpr std::uint64_t kVoteLimits = 2;

}  // namespace

Ballot::Ballot(const Vote& vote, const Limits& limits, std::uint64_t patience_ms,
               std::uint64_t now_ms) noexcept
    : vote_(vote),
      limits_(limits),
      at_ms_(now_ms),
      until_ms_(now_ms + patience_ms),
      gives_up_ms_(now_ms + patience_ms),
      asks_left_((limits.answer_ms + kVoteLimits * vote_limit_ms(limits, vote.num_ranks)) /
                 limits.ask_ms) {
  vote_.kind = VoteKind::kVote;
  vote_.question = 0;
}

void Ballot::end(Verdict verdict, const char* reason) noexcept {
  verdict_ = verdict;
  step_ = Step::kDone;
  if (reason != nullptr) std::snprintf(reply_.reason, sizeof reply_.reason, "%s", reason);
}

/// On a new connection: of an old one nobody can tell whether it leads anywhere.
void Ballot::ask_again(std::uint64_t at_ms) noexcept {
  if (asks_left_-- == 0) {
    return end(Verdict::kFailed, "the arbiter is lost, and other ranks may have the table");
  }
  vote_.kind = VoteKind::kRecall;
  step_ = Step::kConnect;
  at_ms_ = at_ms;
  until_ms_ = at_ms + limits_.ask_ms;
}

void Ballot::worked(std::uint64_t now_ms) noexcept {
  if (step_ == Step::kConnect) {
    step_ = Step::kSend;
    return;
  }
  if (step_ != Step::kSend) return;
  step_ = Step::kListen;
  until_ms_ = now_ms + limits_.ask_ms;
  if (has_confirmed()) return;
  gives_up_ms_ = now_ms + kVoteLimits * vote_limit_ms(limits_, vote_.num_ranks);
  until_ms_ = gives_up_ms_;
}

void Ballot::failed(std::uint64_t now_ms) noexcept {
  if (step_ == Step::kDone) return;
  if (has_confirmed()) return ask_again(now_ms + limits_.ask_ms);
  if (step_ != Step::kConnect) {
    return end(Verdict::kAbstain, "the connection to the arbiter ended");
  }
  at_ms_ = now_ms + kRetryMs;  // it does not listen yet
  look_at_clock(now_ms);
}

void Ballot::hear(const Reply& reply, std::uint64_t now_ms) noexcept {
  if (step_ != Step::kListen) return;
  if (reply.kind == ReplyKind::kStillThere) {
    if (has_confirmed()) return;
    vote_.kind = VoteKind::kConfirm;  // from now on, since it may arrive although sending fails
    vote_.question = reply.question;
    step_ = Step::kSend;
    until_ms_ = now_ms + limits_.ask_ms;
    return;
  }
  // What a stranger says is no answer, and nobody has the table before all have confirmed.
  const bool is_answer = reply.kind == ReplyKind::kAbstain || has_confirmed();
  if (reply.kind == ReplyKind::kStranger || !is_answer) return failed(now_ms);
  reply_ = reply;
  end(reply.kind == ReplyKind::kTable ? Verdict::kTable : Verdict::kAbstain, nullptr);
}

void Ballot::look_at_clock(std::uint64_t now_ms) noexcept {
  if (step_ == Step::kDone) return;
  if (has_confirmed()) {
    if (now_ms >= until_ms_) ask_again(now_ms);
  } else if (now_ms >= gives_up_ms_) {
    end(Verdict::kAbstain, "no answer from the arbiter in time");
  }
}

}  // namespace dynamiccl
