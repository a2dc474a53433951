// The stops of one communicator on one rank: calls inside which all ranks vote on the table that is
// in force from that call on. A state machine without sockets, clocks or threads.
//
// A call is a question of NCCL's about a collective; calls are counted from 1 on. With `init`, and
// then with each decision, the ranks get the index of the next stop. The stop is the first call at
// or after that index that begins a group. There a rank votes (Ballot), with a digest of all calls
// before this one and of what NCCL told of them (marks.h). In the end it knows the decision, or
// that there is none for this stop: then it has failed, and the table in force stays.
//
// Why all ranks use one table for each call:
//
// 1. `init` gives all ranks one table, stop 1 and its index, or none of them any.
// 2. A decision takes the confirmation of all ranks, each from inside its stop and for one question
//    of the arbiter's. The question came with the table, the next index and the span, so all ranks
//    hold the same before anybody is told the decision.
// 3. All digests were equal. So all ranks have made the same calls before, and stand at the same
//    one; that some of them may only simulate it changes nothing, since what they will call after
//    it is asked about anew, and later digests differ by the mark "not launched".
// 4. Who has not confirmed may leave by itself: its stop has failed, there can be no decision, and
//    it never votes in that round again. Who has confirmed is freed by an answer alone, and the
//    arbiter's answers to one round are equal (rounds.h). So a stop has failed for all ranks or for
//    none, however they came to know: by an answer, by a lost connection, by their own patience.
// 5. After a failure the next index is computed from the last index, the span, the number of
//    failures in a row and the communicator's id, which are equal on all ranks by 1 and 2. It is
//    not computed from the call at which the rank stood, nor from any time, nor from the reason.
//    So ranks may be in different stops only while one of them has not come to the end of the
//    earlier one, and the later one cannot be decided without it.
// 6. Who ends voting (a shrink, a second context of this id, overlapping calls, no time left) never
//    confirms again: nothing can be decided, and the table in force stays, for all.
#pragma once

#include <cstdint>

#include "agree/vote.h"

namespace dynamiccl {

struct DecisionTable;

class Stops {
 public:
  /// In a row; after that the communicator keeps its table.
  static constexpr std::uint32_t kMostFailures = 20;
  static constexpr std::uint64_t kNever = ~std::uint64_t{0};

  /// `agreed`: what all ranks confirmed in `init`. No table (null) is NCCL's own choice.
  Stops(std::uint64_t comm_id, const DecisionTable* table, const Reply& agreed) noexcept;

  // ---- a call, on the calling thread ----

  /// Whether the call that begins is the next stop.
  bool is_due(bool begins_group) const noexcept {
    return calls_ + 1 >= at_ && begins_group && votes();
  }
  /// The table in force; for any thread.
  const DecisionTable* table() const noexcept { return __atomic_load_n(&table_, __ATOMIC_ACQUIRE); }
  /// The call has been answered. `marks`: what NCCL told of it.
  void answered(int collective, std::uint64_t size_bytes, std::uint64_t marks) noexcept;
  std::uint64_t calls() const noexcept { return calls_; }
  /// The latest table; NCCL's own choice may be in force meanwhile.
  const DecisionTable* last_table() const noexcept { return last_table_; }

  // ---- a stop, inside the call ----

  /// How long to wait for the others before it confirms.
  std::uint64_t patience_ms(const Limits& limits) const noexcept;
  void write_vote(Vote* vote) const noexcept;
  /// All ranks have agreed on what this one has confirmed. `table`: the one that came with it. Of
  /// those before none will be in force again.
  void agreed(const Reply& proposal, const DecisionTable* table) noexcept;
  /// There is no decision for this stop.
  void failed() noexcept;

  /// The round of the next stop, and its index; kNever: there is none.
  std::uint64_t number() const noexcept { return number_; }
  std::uint64_t index() const noexcept { return at_; }

  // ---- any thread ----

  /// Takes no part in stops from the next one on; the table in force stays. False where it had
  /// ended before.
  bool end_voting() noexcept { return __atomic_exchange_n(&votes_, false, __ATOMIC_RELAXED); }
  bool votes() const noexcept { return __atomic_load_n(&votes_, __ATOMIC_RELAXED); }

 private:
  friend struct Explored;  // the explorer, which tells states apart

  void go_to(std::uint64_t earliest, std::uint64_t width) noexcept;

  std::uint64_t comm_id_;
  const DecisionTable* last_table_;  // that was in force, or is
  const DecisionTable* table_;
  std::uint64_t calls_ = 0;
  std::uint64_t digest_ = 0;
  std::uint64_t number_ = 0;
  std::uint64_t earliest_ = 0;  // the index before it was shifted
  std::uint64_t at_ = kNever;
  std::uint64_t span_calls_ = 1;
  std::uint32_t failures_ = 0;  // in a row
  bool votes_ = true;
};

}  // namespace dynamiccl
