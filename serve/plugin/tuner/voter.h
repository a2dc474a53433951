// One rank's side of the agreement in `init`: a state machine without sockets, clocks or threads.
//
//   hello, until a coordinator answers           not within half the limit: abstain, having voted
//                                                for nothing, so that nobody can get the table
//   vote, again and again                        the answers are wait, still here?, table, abstain
//   confirm                                      once for each "still here?"
//
// Whoever has voted may not decide alone any more: the others may have been told "table". A rank
// that then learns nothing for three limits fails its `init`.
#pragma once

#include <cstdint>

#include "tuner/message.h"

namespace dynamiccl {

/// How long all ranks may take to vote, from the first vote on: 10 s, and 1 s for each 1,000 ranks
/// (10,000 loads of a library from NFS).
constexpr std::uint64_t limit_ms(std::uint32_t num_ranks) noexcept {
  return 10'000 + std::uint64_t{num_ranks};
}

/// A coordinator that is not there yet is tried again after so long.
inline constexpr std::uint64_t kRetryMs = 20;

enum class Outcome : std::uint8_t { kOpen, kTable, kAbstain, kFailed };

class Voter {
 public:
  /// `vote` is what to vote with; kind, incarnation and question are filled in here. A rank that
  /// `only_objects` cannot use the table: it says why, so that nobody waits for it, and abstains
  /// whatever the answer. `limit_ms` is for the coordinator to come: shorter in a process that has
  /// waited in vain before.
  Voter(const Request& vote, bool only_objects, std::uint64_t hello_limit_ms,
        std::uint64_t now_ms) noexcept;

  /// What to send now. Only while the outcome is open.
  const Request& request() const noexcept { return request_; }
  /// When to send it.
  std::uint64_t send_at_ms() const noexcept { return send_at_ms_; }

  void hear(const Answer& answer, std::uint64_t now_ms) noexcept;
  /// The request got no answer: refused, lost, or too late.
  void hear_nothing(std::uint64_t now_ms) noexcept;
  /// Ends what has lasted too long.
  void look_at_clock(std::uint64_t now_ms) noexcept;

  Outcome outcome() const noexcept { return outcome_; }
  /// Why not the table; ends with a zero.
  const char* reason() const noexcept { return reason_; }
  bool has_voted() const noexcept { return request_.kind != RequestKind::kHello; }
  /// No later than then look_at_clock() ends it.
  std::uint64_t ends_at_ms() const noexcept { return ends_at_ms_; }

 private:
  void abstain(const char* reason) noexcept;

  Request request_;
  bool only_objects_;
  Outcome outcome_ = Outcome::kOpen;
  std::uint64_t send_at_ms_;
  std::uint64_t ends_at_ms_;
  char reason_[kMaxReasonBytes] = "";
};

}  // namespace dynamiccl
