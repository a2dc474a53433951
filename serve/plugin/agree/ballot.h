// One rank's part in one round: a state machine without sockets, clocks or threads. Whoever drives
// it does what `step` says, and reports back:
//
//   kConnect   connect, at `at_ms`                worked, failed
//   kSend      send `vote` on this connection     worked, failed
//   kListen    hear                               hear, failed (it ended)
//   kDone      `verdict`
//
// and calls look_at_clock at `until_ms` at the latest.
#pragma once

#include <cstdint>
#include <cstdio>

#include "agree/vote.h"

namespace dynamiccl {

struct Ballot {
  enum class Step : std::uint8_t { kConnect, kSend, kListen, kDone };

  /// `patience`: how long to wait for anything before it confirms, and in `init`, once it has
  /// voted, twice as long and 2 ms for each rank: the arbiter ends a round one vote limit after its
  /// first vote.
  Ballot(const Vote& own, const Limits& limits, std::uint64_t patience,
         std::uint64_t now_ms) noexcept
      : vote(own),
        at_ms(now_ms),
        until_ms(now_ms + patience),
        patience_ms(patience),
        ask_ms(limits.ask_ms),
        asks_left((limits.answer_ms + 2 * vote_limit_ms(limits, own.num_ranks)) / limits.ask_ms) {
    vote.kind = VoteKind::kVote;
    vote.question = 0;
  }

  bool has_confirmed() const noexcept { return vote.kind != VoteKind::kVote; }

  void worked(std::uint64_t now_ms) noexcept {
    if (step == Step::kConnect) {
      step = Step::kSend;
    } else if (step == Step::kSend) {
      step = Step::kListen;
      if (has_confirmed()) {
        until_ms = now_ms + ask_ms;
      } else if (vote.round.number == 0) {
        until_ms = now_ms + 2 * (patience_ms + vote.num_ranks);
      }
    }
  }

  /// A connection that was refused or has ended, or something that could not be sent.
  void failed(std::uint64_t now_ms, const char* why = "") noexcept {
    if (step == Step::kDone) return;
    if (has_confirmed()) return ask_again(now_ms < until_ms ? until_ms : now_ms);
    end(Verdict::kAbstain,
        step == Step::kConnect ? "the arbiter does not listen"
                               : "the connection to the arbiter ended",
        why);
  }

  void hear(const Reply& heard, std::uint64_t now_ms) noexcept {
    if (step != Step::kListen) return;
    if (heard.kind == ReplyKind::kStillThere) {
      if (has_confirmed()) return;
      proposal = heard;
      vote.kind = VoteKind::kConfirm;  // from now on, since it may arrive although sending fails
      vote.question = heard.question;
      step = Step::kSend;
      until_ms = now_ms + ask_ms;
      return;
    }
    // What a stranger says is no answer, and nobody has the table before all have confirmed.
    const bool is_answer = heard.kind == ReplyKind::kAbstain || has_confirmed();
    if (heard.kind == ReplyKind::kStranger || !is_answer) return failed(now_ms);
    end(heard.kind == ReplyKind::kTable ? Verdict::kTable : Verdict::kAbstain, heard.reason);
  }

  void look_at_clock(std::uint64_t now_ms) noexcept {
    if (step == Step::kDone || now_ms < until_ms) return;
    if (has_confirmed()) return ask_again(now_ms);
    end(Verdict::kAbstain, "no answer from the arbiter in time");
  }

  /// The communicator is aborted. What others decide is not known to a rank that has confirmed.
  void leave() noexcept {
    if (step == Step::kDone) return;
    end(has_confirmed() ? Verdict::kFailed : Verdict::kAbstain, "the communicator was aborted");
  }

  void end(Verdict known, const char* what, const char* why = "") noexcept {
    verdict = known;
    step = Step::kDone;
    std::snprintf(reason, sizeof reason, "%s%s%s", what, why[0] != '\0' ? ": " : "", why);
  }

  /// On a new connection: of an old one nobody can tell whether it leads anywhere.
  void ask_again(std::uint64_t when_ms) noexcept {
    if (asks_left-- == 0) {
      return end(Verdict::kFailed, "the arbiter is lost, and other ranks may have the table");
    }
    vote.kind = VoteKind::kRecall;
    step = Step::kConnect;
    at_ms = when_ms;
    until_ms = when_ms + ask_ms;
  }

  Vote vote;
  Step step = Step::kConnect;
  Verdict verdict = Verdict::kOpen;
  Reply proposal;                          // what it has confirmed
  char reason[sizeof Reply::reason] = "";  // but for kTable
  std::uint64_t at_ms, until_ms, patience_ms, ask_ms;
  std::uint64_t asks_left;  // afterwards: the answer limit, which does not run while it is stopped
};

}  // namespace dynamiccl
