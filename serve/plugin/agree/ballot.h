// One rank's part in one round: a state machine without sockets, clocks or threads. Whoever drives
// it does what `step` says, and reports back:
//
//   kConnect   connect at `at_ms`, until `until_ms`     worked, failed
//   kSend      send `vote()` on this connection         worked, failed
//   kListen    hear until `until_ms`                    hear, failed (it ended), look_at_clock
//   kDone      `outcome()`
#pragma once

#include <cstdint>

#include "agree/vote.h"

namespace dynamiccl {

enum class Verdict : std::uint8_t {
  kOpen,
  kTable,
  kAbstain,
  /// It had confirmed and got no answer for the whole answer limit: others may have the table.
  kFailed,
};

class Ballot {
 public:
  enum class Step : std::uint8_t { kConnect, kSend, kListen, kDone };

  /// `patience_ms`: how long to wait for an arbiter that does not listen.
  Ballot(const Vote& vote, const Limits& limits, std::uint64_t patience_ms,
         std::uint64_t now_ms) noexcept;

  Step step() const noexcept { return step_; }
  /// When to connect.
  std::uint64_t at_ms() const noexcept { return at_ms_; }
  /// When to call `look_at_clock` at the latest.
  std::uint64_t until_ms() const noexcept { return until_ms_; }
  const Vote& vote() const noexcept { return vote_; }
  bool has_confirmed() const noexcept { return vote_.kind != VoteKind::kVote; }
  Verdict verdict() const noexcept { return verdict_; }
  /// Why it has no table; zero-terminated.
  const char* reason() const noexcept { return reply_.reason; }
  /// The decision that it was told.
  const Reply& reply() const noexcept { return reply_; }

  void worked(std::uint64_t now_ms) noexcept;
  /// A connection that was refused or has ended, or something that could not be sent.
  void failed(std::uint64_t now_ms) noexcept;
  void hear(const Reply& reply, std::uint64_t now_ms) noexcept;
  void look_at_clock(std::uint64_t now_ms) noexcept;

 private:
  friend struct Explored;  // the explorer, which tells states apart

  void end(Verdict verdict, const char* reason) noexcept;
  void ask_again(std::uint64_t at_ms) noexcept;

  Vote vote_;
  Limits limits_;
  Step step_ = Step::kConnect;
  Verdict verdict_ = Verdict::kOpen;
  std::uint64_t at_ms_;
  std::uint64_t until_ms_;
  std::uint64_t gives_up_ms_;  // before it confirms: when it abstains by itself
  std::uint64_t asks_left_;  // afterwards: the answer limit, which does not run while it is stopped
  Reply reply_;
};

}  // namespace dynamiccl
