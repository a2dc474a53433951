// The leader's side of a communicator's agreement; see rules.h. No sockets, as in Member.
#pragma once

#include <cstddef>
#include <cstdint>

#include "adaptive/agreement/clock.h"
#include "adaptive/agreement/member.h"
#include "adaptive/agreement/rules.h"

namespace dynamiccl {

class Leader {
 public:
  enum class State { kGathering, kIdle, kPolling, kVoting, kSettling, kEnded };

  /// `identity`: text lines `name=value` in which all ranks must agree; copied. Null when memory is
  /// short.
  static Leader* create(const Member::Place& place, Clock* clock, const char* identity,
                        const Outlet& outlet, const Timing& timing, std::uint64_t now_ns) noexcept;
  static void destroy(Leader* leader) noexcept;

  void receive(std::int32_t from_rank, const Message& message, std::uint64_t now_ns) noexcept;
  void tick(std::uint64_t now_ns) noexcept;

  /// Propose a table (.dct bytes, copied; none: abstain everywhere) as soon as possible, optionally
  /// as a probe, which call records then show. Replaces a proposal that is still waiting. False:
  /// there is no agreement (any more), or out of memory.
  bool propose(const std::uint8_t* table, std::size_t table_bytes, bool is_probe) noexcept;

  State state() const noexcept { return state_; }
  /// Whether no proposal is running or waiting.
  bool is_settled() const noexcept { return state_ == State::kIdle && !wanted_; }
  /// Number of proposals that were agreed on.
  std::uint32_t committed() const noexcept { return committed_; }
  /// Why the agreement ended, or why the latest proposal was abandoned; "" at first.
  const char* reason() const noexcept { return reason_; }
  std::uint64_t due_ns() const noexcept { return due_ns_; }
  /// The longest time that calls of one rank have waited at stops so far.
  std::uint64_t waited_ns() const noexcept { return waited_ns_; }
  std::int32_t num_here() const noexcept;
  /// The lowest rank that has not joined; num_ranks when all have.
  std::int32_t first_missing() const noexcept;

 private:
  friend struct Inspect;

  struct Rank {
    bool here;            // said hello
    bool answered;        // in this phase; a vote: yes
    bool is_ready;        // will stop at the call
    std::uint64_t calls;  // of its report
  };

  Leader(const Member::Place& place, Clock* clock, const Outlet& outlet, const Timing& timing,
         Rank* ranks, char* identity) noexcept;
  ~Leader();

  void hello(std::int32_t rank, const Message& message) noexcept;
  void end(std::uint64_t now_ns) noexcept;
  void enter(State state, std::uint64_t now_ns) noexcept;
  void put_next(std::uint64_t now_ns) noexcept;
  void ask_for_votes(std::uint64_t now_ns) noexcept;
  void decide(bool commit, std::uint64_t now_ns) noexcept;
  void count_vote(std::int32_t number, const Message& message, std::uint64_t now_ns) noexcept;
  void repeat() noexcept;
  void say(std::int32_t rank) noexcept;
  bool all_answered() const noexcept;
  std::uint64_t patience_ns() const noexcept;
  void measure_rate(std::uint64_t now_ns) noexcept;
  __attribute__((format(printf, 2, 3))) void note(const char* format, ...) noexcept;

  const Member::Place place_;
  Clock* const clock_;
  const Outlet outlet_;
  const Timing timing_;
  Rank* const ranks_;
  char* const identity_;

  State state_ = State::kGathering;
  std::uint32_t proposal_ = 0;
  std::uint64_t phase_since_ns_ = 0;
  std::uint64_t said_at_ns_ = 0;
  std::uint64_t due_ns_ = 0;
  std::uint64_t retry_at_ns_ = 0;
  std::uint32_t called_off_ = 0;  // in a row
  bool for_good_ = false;         // nothing will be agreed after this decision
  char reason_[256] = "";

  // The waiting proposal, and the current one.
  bool wanted_ = false;
  std::uint8_t* table_ = nullptr;
  std::size_t table_bytes_ = 0;
  bool is_probe_ = false;
  std::uint64_t compare_at_ = 0;
  std::uint64_t compare_hash_ = 0;
  std::uint64_t at_ = 0;
  std::uint64_t first_yes_ns_ = 0;  // 0: none yet
  std::int32_t first_yes_rank_ = 0;
  std::uint64_t stands_at_ = 0;  // its call
  std::uint64_t hash_ = 0;       // that it came with

  std::uint64_t waited_ns_ = 0;
  bool commit_ = false;
  std::uint32_t committed_ = 0;

  std::uint64_t rate_calls_ = 0;
  std::uint64_t rate_since_ns_ = 0;
  double calls_per_ns_ = 0.0;
};

}  // namespace dynamiccl
