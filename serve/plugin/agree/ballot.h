// One rank's part in one round: a state machine without sockets, clocks or threads. Whoever drives
// it does what `step` says, and reports back:
//
//   kConnect   connect at `at_ms`, until `until_ms`     worked, failed
//   kSend      send `vote()` on this connection         worked, failed
//   kListen    hear until `until_ms`                    hear, failed (it ended), look_at_clock
//   kDone      `outcome()`
#pragma once

#include <cstdint>
#include <cstdio>

#include "agree/vote.h"

namespace dynamiccl {

class Ballot {
 public:
  enum class Step : std::uint8_t { kConnect, kSend, kListen, kDone };

  /// `patience_ms`: in `init`, how long to wait for an arbiter that does not listen; at a stop, how
  /// long to wait for anything before it confirms.
  Ballot(const Vote& vote, const Limits& limits, std::uint64_t patience_ms,
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

  Step step() const noexcept { return step_; }
  /// When to connect.
  std::uint64_t at_ms() const noexcept { return at_ms_; }
  /// When to call `look_at_clock` at the latest.
  std::uint64_t until_ms() const noexcept { return until_ms_; }
  const Vote& vote() const noexcept { return vote_; }
  bool has_confirmed() const noexcept { return vote_.kind != VoteKind::kVote; }
  Verdict verdict() const noexcept { return verdict_; }
  /// The decision that it was told.
  const Reply& reply() const noexcept { return reply_; }
  /// What it has confirmed.
  const Reply& proposal() const noexcept { return proposal_; }

  void worked(std::uint64_t now_ms) noexcept {
    if (step_ == Step::kConnect) {
      step_ = Step::kSend;
      return;
    }
    if (step_ != Step::kSend) return;
    step_ = Step::kListen;
    until_ms_ = now_ms + limits_.ask_ms;
    if (has_confirmed()) return;
    if (!is_at_stop()) {
      gives_up_ms_ = now_ms + kVoteLimits * vote_limit_ms(limits_, vote_.num_ranks);
    }
    until_ms_ = gives_up_ms_;
  }

  /// A connection that was refused or has ended, or something that could not be sent.
  void failed(std::uint64_t now_ms) noexcept {
    if (step_ == Step::kDone) return;
    if (has_confirmed()) return ask_again(now_ms + limits_.ask_ms);
    if (step_ != Step::kConnect || is_at_stop()) {
      return end(Verdict::kAbstain, step_ == Step::kConnect
                                        ? "the arbiter does not listen"
                                        : "the connection to the arbiter ended");
    }
    at_ms_ = now_ms + kRetryMs;  // it does not listen yet
    look_at_clock(now_ms);
  }

  void hear(const Reply& reply, std::uint64_t now_ms) noexcept {
    if (step_ != Step::kListen) return;
    if (reply.kind == ReplyKind::kStillThere) {
      if (has_confirmed()) return;
      proposal_ = reply;
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

  void look_at_clock(std::uint64_t now_ms) noexcept {
    if (step_ == Step::kDone) return;
    if (has_confirmed()) {
      if (now_ms >= until_ms_) ask_again(now_ms);
    } else if (now_ms >= gives_up_ms_) {
      end(Verdict::kAbstain, "no answer from the arbiter in time");
    }
  }

  /// The communicator is aborted. What others decide is not known to a rank that has confirmed.
  void leave() noexcept {
    if (step_ == Step::kDone) return;
    end(has_confirmed() ? Verdict::kFailed : Verdict::kAbstain, "the communicator was aborted");
  }

 private:
  friend struct Explored;  // the explorer, which tells states apart

  /// Pause before an arbiter that does not listen yet is tried again.
  static constexpr std::uint64_t kRetryMs = 20;
  /// The arbiter ends a round one limit after its first vote; twice that is patience enough.
  static constexpr std::uint64_t kVoteLimits = 2;

  void end(Verdict verdict, const char* reason) noexcept {
    verdict_ = verdict;
    step_ = Step::kDone;
    if (reason != nullptr) std::snprintf(reply_.reason, sizeof reply_.reason, "%s", reason);
  }

  /// On a new connection: of an old one nobody can tell whether it leads anywhere.
  void ask_again(std::uint64_t at_ms) noexcept {
    if (asks_left_-- == 0) {
      return end(Verdict::kFailed, "the arbiter is lost, and other ranks may have the table");
    }
    vote_.kind = VoteKind::kRecall;
    step_ = Step::kConnect;
    at_ms_ = at_ms;
    until_ms_ = at_ms + limits_.ask_ms;
  }

  bool is_at_stop() const noexcept { return vote_.round.number != 0; }

  Vote vote_;
  Limits limits_;
  Step step_ = Step::kConnect;
  Verdict verdict_ = Verdict::kOpen;
  std::uint64_t at_ms_;
  std::uint64_t until_ms_;
  std::uint64_t gives_up_ms_;  // before it confirms: when it abstains by itself
  std::uint64_t asks_left_;  // afterwards: the answer limit, which does not run while it is stopped
  Reply proposal_;
  Reply reply_;
};

}  // namespace dynamiccl
