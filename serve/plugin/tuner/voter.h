// One rank's side of the agreement in `init`: a state machine without sockets, clocks or threads.
//
//   hello, until a coordinator answers     not within half the limit: abstain
//   vote, again and again                  wait, still here?, abstain; a coordinator that replaced
//                                          this one: hello again; half a limit without an answer:
//                                          abstain
//   confirm, from the first "still here?"  wait, table, abstain; three limits without an answer:
//     on, again and again                  fail
//
// No rank gets the answer "table" before all ranks have confirmed. So a rank that has not confirmed
// may abstain by itself at any time. One that has confirmed may not: the others may have the table.
// If it then gets no answer, its `init` fails.
#pragma once

#include <cstdint>
#include <cstdlib>

#include "tuner/message.h"

namespace dynamiccl {

/// 10 s; shorter in tests (DYNAMICCL_TEST_LIMIT_MS).
inline std::uint64_t base_limit_ms() noexcept {
#ifdef DYNAMICCL_TESTS
  if (const char* text = std::getenv("DYNAMICCL_TEST_LIMIT_MS")) {
    return std::strtoull(text, nullptr, 10);
  }
#endif
  return 10'000;
}

/// How long all ranks may take to vote, from the first vote on: 10 s, and 1 s for each 1,000 ranks
/// (10,000 loads of a library from NFS).
inline std::uint64_t limit_ms(std::uint32_t num_ranks) noexcept {
  return base_limit_ms() + std::uint64_t{num_ranks};
}

/// The limit after a wait in vain: still enough for so many ranks to send a few requests each
/// (coordinator.cpp, kRanksPerMs).
inline std::uint64_t short_limit_ms(std::uint32_t num_ranks) noexcept {
  return base_limit_ms() / 10 + std::uint64_t{num_ranks};
}

/// Pause before a coordinator that does not listen yet is tried again.
inline constexpr std::uint64_t kRetryMs = 20;

enum class Outcome : std::uint8_t { kOpen, kTable, kAbstain, kFailed };

class Voter {
 public:
  /// `vote` is the vote to send; kind, incarnation and question are filled in here. A rank with
  /// `only_objects` cannot use the table: it votes with the reason, so that nobody waits for it,
  /// and abstains whatever the answer. `hello_limit_ms` limits the wait for a coordinator: shorter
  /// in a process that has waited in vain before.
  Voter(const Request& vote, bool only_objects, std::uint64_t hello_limit_ms,
        std::uint64_t now_ms) noexcept;

  /// The next request to send. Only while the outcome is open.
  const Request& request() const noexcept { return request_; }
  /// When to send it.
  std::uint64_t send_at_ms() const noexcept { return send_at_ms_; }

  void hear(const Answer& answer, std::uint64_t now_ms) noexcept;
  /// The request got no answer: refused, lost, or timed out.
  void hear_nothing(std::uint64_t now_ms) noexcept;
  /// Applies time limits.
  void look_at_clock(std::uint64_t now_ms) noexcept;

  Outcome outcome() const noexcept { return outcome_; }
  /// Why the rank has no table; zero-terminated.
  const char* reason() const noexcept { return reason_; }
  bool has_voted() const noexcept { return request_.kind != RequestKind::kHello; }
  bool has_confirmed() const noexcept { return request_.kind == RequestKind::kConfirm; }
  /// How long to wait for an answer; never 0, so that a rank that was suspended asks again.
  std::uint64_t patience_ms(std::uint64_t now_ms) const noexcept;

 private:
  friend struct Explored;  // the explorer, which tells states apart

  void abstain(const char* reason) noexcept;

  Request request_;
  bool only_objects_;
  bool has_ever_voted_ = false;
  Outcome outcome_ = Outcome::kOpen;
  std::uint64_t send_at_ms_;
  std::uint64_t silent_until_ms_;  // without an answer until then, one that may abstain does
  std::uint64_t ends_at_ms_;
  int num_in_vain_ = 0;  // requests since the latest answer
  char reason_[kMaxReasonBytes] = "";
};

}  // namespace dynamiccl
