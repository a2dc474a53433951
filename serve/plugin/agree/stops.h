// The stops of one communicator on one rank: calls inside which all ranks vote on the table that is
// in force from that call on. A state machine without sockets, clocks or threads.
//
// A call is a question of NCCL's about a collective; calls are counted from 1 on. With `init`, and
// then with each decision, the ranks get the index of the next stop: the first call at or after it
// that begins a group. There a rank votes (Ballot), with a digest of all calls before this one and
// of what NCCL told of them (CallMarks). A stop without a decision has failed: the table stays.
//
// Why all ranks use one table for each call:
//
// 1. `init` gives all ranks one table, stop 1 and its index, or none of them any.
// 2. A decision takes the confirmation of all ranks, each from inside its stop and for one question
//    of the arbiter's. That came with the table, the next index and the span: all hold the same.
// 3. All digests were equal: all ranks have made the same calls, and stand at the same one. Some
//    may only simulate it: what they call after it is asked about anew, and later digests differ.
// 4. Who has not confirmed may leave: there can be no decision without it, and it never votes in
//    that round again. Who has confirmed is freed by an answer alone, and the arbiter's answers to
//    one round are equal (rounds.h). So a stop has failed for all ranks or for none.
// 5. After a failure the next index comes from the last one, the span, the number of failures in a
//    row and the communicator's id, equal on all ranks by 1 and 2; not from the call at which a
//    rank stood, a time or the reason. So ranks are in different stops only while one has not ended
//    the earlier one, and the later one cannot be decided without it.
// 6. Who ends voting (a shrink, a second context of this id, overlapping calls) takes part in no
//    later stop: nothing can be decided there, and the table in force stays, for all.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "agree/vote.h"

namespace dynamiccl {

struct DecisionTable;

/// What NCCL's profiler tells about the calls of one communicator.
///
/// getCollInfo alone cannot tell a question from a call that will run: calls captured in a CUDA
/// graph are replayed without being asked about, and ncclGroupSimulateEnd asks about calls that
/// never run. From 2.28 on NCCL's profiler tells of both, on the calling thread: CollApi says what
/// is captured, and KernelLaunch comes once the calls are launched (v2.28.9-1 `src/enqueue.cc`,
/// ncclLaunchKernel).
struct CallMarks {
  static constexpr std::uint64_t kCaptured = 1;  // the calls that are asked about now are captured
  /// What was asked about before has been launched: the next one begins a group.
  static constexpr std::uint64_t kBegins = 2;

  void begin() noexcept {
    bits.store(kBegins, std::memory_order_relaxed);
    group = nullptr;
  }
  /// Set by the profiler, on the calling thread.
  void set_captured(bool is_captured) noexcept {
    const std::uint64_t others = bits.load(std::memory_order_relaxed) & ~kCaptured;
    bits.store(others | (is_captured ? kCaptured : 0), std::memory_order_relaxed);
  }
  /// A plan of that group was launched. A launch of another group (send and receive) does not show
  /// that a collective asked about earlier runs: it may have been simulated.
  void set_launched(const void* of_group) noexcept {
    if (of_group != group) return;
    bits.store(bits.load(std::memory_order_relaxed) | kBegins, std::memory_order_relaxed);
  }

  /// A question has been answered. Returns the marks that it came with.
  std::uint64_t pass() noexcept {
    const std::uint64_t before = bits.load(std::memory_order_relaxed);
    bits.store(before & ~kBegins, std::memory_order_relaxed);
    return before;
  }
  bool begins_group() const noexcept {
    return (bits.load(std::memory_order_relaxed) & kBegins) != 0;
  }

  std::atomic<std::uint64_t> bits{kBegins};
  const void* group = nullptr;  // of the API, that the latest collective belongs to
};

class Stops {
 public:
  static constexpr std::uint64_t kNever = ~std::uint64_t{0};

  /// `agreed`: what all ranks confirmed in `init`. No table (null) is NCCL's own choice.
  Stops(std::uint64_t comm_id, const DecisionTable* table, const Reply& agreed) noexcept
      : comm_id_(comm_id), last_table_(table), table_(table) {
    succeeded(agreed);
  }

  /// Whether the call that begins is the next stop.
  bool is_due(bool begins_group) const noexcept {
    return calls_ + 1 >= at_ && begins_group && __atomic_load_n(&votes_, __ATOMIC_RELAXED);
  }
  /// The call has been answered. `marks`: what NCCL told of it.
  void answered(int collective, std::uint64_t size_bytes, std::uint64_t marks) noexcept {
    __atomic_store_n(&calls_, calls_ + 1, __ATOMIC_RELAXED);
    const auto number = static_cast<std::uint64_t>(collective);
    digest_ = mixed(mixed(mixed(digest_, number), size_bytes), marks);
  }
  /// The latest table; NCCL's own choice may be in force meanwhile.
  const DecisionTable* last_table() const noexcept { return last_table_; }

  /// How long to wait for the others before it confirms.
  std::uint64_t patience_ms(const Limits& limits) const noexcept {
    return limits.patience_ms << std::min(failures_, kMorePatienceTimes);
  }
  void write_vote(Vote* vote) const noexcept {
    vote->round.comm = comm_id_;
    vote->round.number = number_;
    for (std::uint64_t& field : vote->fields) field = 0;
    vote->fields[0] = digest_;
    vote->fields[1] = calls_ + 1;
  }
  /// All ranks have agreed on what this one has confirmed. `table`: the one that came with it. Of
  /// those before none will be in force again.
  void agreed(const Reply& proposal, const DecisionTable* table) noexcept {
    if (proposal.change == Change::kNewTable) last_table_ = table;
    if (proposal.change != Change::kNothing) {
      table = proposal.change == Change::kOwnChoice ? nullptr : last_table_;
      __atomic_store_n(&table_, table, __ATOMIC_RELEASE);
    }
    succeeded(proposal);
  }
  /// There is no decision for this stop.
  void failed() noexcept {
    ++number_;
    ++failures_;
    const std::uint64_t width = span_calls_ << std::min(failures_ - 1, kFurtherTimes);
    at_ = kNever;
    if (failures_ < kMostFailures) go_to(earliest_ + width, width);
  }

  /// The round of the next stop, and its index; kNever: there is none.
  std::uint64_t number() const noexcept { return number_; }
  std::uint64_t index() const noexcept { return at_; }

  // These are for any thread.
  const DecisionTable* table() const noexcept { return __atomic_load_n(&table_, __ATOMIC_ACQUIRE); }
  std::uint64_t calls() const noexcept { return __atomic_load_n(&calls_, __ATOMIC_RELAXED); }
  /// Takes no part in stops from the next one on; the table in force stays. False where it had
  /// ended before.
  bool end_voting() noexcept { return __atomic_exchange_n(&votes_, false, __ATOMIC_RELAXED); }

 private:
  friend struct Explored;  // the explorer, which tells states apart

  /// In a row; after that the communicator keeps its table. After each the next stop is further
  /// away, and patience is longer: these double at most so many times.
  static constexpr std::uint32_t kMostFailures = 20, kFurtherTimes = 14, kMorePatienceTimes = 3;
  /// Indices and spans beyond this are no calls that a job could make.
  static constexpr std::uint64_t kMostCalls = std::uint64_t{1} << 48;

  static std::uint64_t mixed(std::uint64_t before, std::uint64_t number) noexcept {
    const std::uint64_t product = (before ^ number) * 0x9e3779b97f4a7c15U;
    return product ^ product >> 32;
  }

  void succeeded(const Reply& proposal) noexcept {
    ++number_;
    failures_ = 0;
    span_calls_ = std::clamp<std::uint64_t>(proposal.span_calls, 1, kMostCalls);
    at_ = kNever;
    if (proposal.next_stop == 0 || proposal.next_stop > kMostCalls) return;
    go_to(proposal.next_stop, span_calls_);
  }

  /// Shifted by a hash of the communicator's id, and another one each time: two communicators that
  /// ranks call in opposite order would else wait for each other at each of their stops.
  void go_to(std::uint64_t earliest, std::uint64_t width) noexcept {
    earliest_ = earliest;
    at_ = earliest + mixed(mixed(0, comm_id_), number_) % width;
  }

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

/// What a rank tells the leader at a stop, the body of its vote; after it come the times of its
/// latest calls. None of it needs to be equal on all ranks: only what is proposed depends on it.
struct Told {
  std::uint64_t lived_ns = 0;    // of the process, since its first communicator
  std::uint64_t waited_ns = 0;   // of that, inside calls at stops of any communicator
  std::uint64_t has_table = 1;   // in force; 0: NCCL's own choice is
  std::uint64_t last_table = 0;  // checksum of the file of the table that is, or was, in force
  std::uint32_t num_nodes = 0;   // NCCL's
  std::uint32_t nccl_version = 0;
};
static_assert(sizeof(Told) == 40, "no gaps: it is sent as it lies in memory");

/// The GPU time of one call on this rank; fields of CallRecord (profiler/profiler.h).
struct CallTime {
  std::uint64_t sequence, size_bytes, duration_ns;
  std::uint8_t collective, algorithm, protocol, num_channels, decided, flags;
  std::uint8_t zero[2] = {};
};
static_assert(sizeof(CallTime) == 32, "no gaps");

}  // namespace dynamiccl
