// The clock of one communicator on one rank: it counts calls, and switches to another table at a
// call number that all ranks have agreed on.
//
// Two threads share it. The calling thread passes through begin() and end() at every getCollInfo;
// it alone changes the table in force. The agreement's thread only stages a switch, as in two-phase
// commit: it makes the rank stop at a call (prepare), promises that it has stopped (vote), and
// passes on the decision (commit, abandon). The fast path of begin() compares the call number with
// one integer, the gate: the first call at which the slow path is needed.
// which anything is to be done.
#pragma once

#include <atomic>
#include <cstdint>

#include "adaptive/agreement/marks.h"
#include "adaptive/agreement/table_in_force.h"
#include "platform/barriers.h"
#include "platform/threads.h"

namespace dynamiccl {

/// Rolling hash of the calls' arguments: ranks with equal hashes have made the same calls. The
/// marks tell real calls from questions about simulated ones (marks.h).
inline std::uint64_t stream_hash(std::uint64_t before, int collective, std::uint64_t size_bytes,
                                 std::uint64_t marks) noexcept {
  const std::uint64_t call = size_bytes << (3 + CallMarks::kBits) | marks << 3 |
                             static_cast<std::uint64_t>(collective & 7);
  return ((before << 7 | before >> 57) ^ call) * 0x9e3779b97f4a7c15U;
}

class Clock {
 public:
  static constexpr std::uint64_t kNever = ~std::uint64_t{0};
  /// Hashes are kept every so many calls, and this far back.
  static constexpr std::uint64_t kHashEvery = 16;
  static constexpr std::uint64_t kHashSlots = 256;
  static constexpr std::uint64_t kHashReach = kHashEvery * (kHashSlots - 1);

  enum class Turn {
    kGo,       // answer from table()
    kAbstain,  // write nothing: the communicator is being closed, or nobody knows the count
    kWait,     // ask again soon
    kFail,     // answer with an error: waiting is over, and other ranks may have switched
  };

  /// `limit_ns`: how long a stopped call may wait for the decision.
  explicit Clock(std::uint64_t limit_ns) noexcept;
  ~Clock();
  Clock(const Clock&) = delete;
  Clock& operator=(const Clock&) = delete;

  // ---- for the calling thread ----

  /// A call begins. True: look up in table(), then end(). False: call turn() first.
  bool begin() noexcept {
    const std::uint64_t call = count();
    // Pairs with prepare(), which otherwise makes this thread pass a barrier.
    if (fences_) full_barrier();
    return passes(call);
  }

  /// What to do with the call that has begun. The only slow path; takes a lock.
  Turn turn(std::uint64_t now_ns) noexcept;

  const DecisionTable& table() const noexcept { return in_force().decisions; }
  const TableInForce& in_force() const noexcept {
    return *in_force_.load(std::memory_order_relaxed);
  }
  bool is_probing() const noexcept { return in_force().is_probe; }
  std::uint64_t begun() const noexcept { return begun_.load(std::memory_order_relaxed); }

  /// Before any call: where the profiler puts its marks. Must outlive the clock.
  void heed(CallMarks* marks) noexcept { marks_ = marks; }

  /// The call has been answered.
  void end(int collective, std::uint64_t size_bytes) noexcept {
    const std::uint64_t call = begun_.load(std::memory_order_relaxed);
    const std::uint64_t hash =
        stream_hash(hash_.load(std::memory_order_relaxed), collective, size_bytes, marks_->pass());
    hash_.store(hash, std::memory_order_relaxed);
    hashes_[(call - 1) / kHashEvery % kHashSlots].store(hash, std::memory_order_relaxed);
    ended_.store(call, std::memory_order_release);
  }

  // ---- for the agreement's thread ----

  /// Number of answered calls.
  std::uint64_t calls() const noexcept { return ended_.load(std::memory_order_acquire); }

  /// The stream's hash after `calls`, a multiple of kHashEvery. False when that call has not come
  /// yet, or is too long ago.
  bool hash_after(std::uint64_t calls, std::uint64_t* hash) const noexcept;

  /// Stop at call `at`, or at the first later one that begins a group. False when that call is
  /// over, or another stop is pending.
  bool prepare(std::uint64_t at) noexcept;

  /// Whether that call has come and waits. If so, writes the hash of the stream before it and the
  /// call's number, and promises to wait for commit() or abandon(). Before that it may still go on
  /// by itself.
  bool vote(std::uint64_t* hash, std::uint64_t* call) noexcept;

  /// The decision: use `next` (takes the reference) from the waiting call on.
  void commit(TableInForce* next) noexcept;

  /// The decision, or a withdrawal: keep the table in force, and do not stop.
  void abandon() noexcept;

  /// The number of the table in force.
  std::uint32_t table_number() const noexcept;

  /// Total time that calls have waited at stops, up to the latest that went on.
  std::uint64_t waited_ns() const noexcept { return waited_ns_.load(std::memory_order_relaxed); }

  /// Whether a call is waiting.
  bool is_waiting() const noexcept { return waiting_.load(std::memory_order_relaxed); }

  /// Whether calls of one communicator overlapped, which makes counting impossible.
  bool is_broken() const noexcept { return broken_.load(std::memory_order_relaxed); }

  // ---- for any thread ----

  /// Calls that were captured in a CUDA graph, as far as NCCL tells.
  std::uint64_t captured_calls() const noexcept {
    return marks_->captured.load(std::memory_order_relaxed);
  }

  /// The table in force, for another thread than the calling one; alive as long as this object.
  class Look {
   public:
    explicit Look(const Clock& clock) noexcept : lookers_(clock.lookers_) {
      // Pairs with drop(): either it sees this one, or this one sees the new table.
      lookers_.fetch_add(1, std::memory_order_seq_cst);
      table_ = clock.in_force_.load(std::memory_order_seq_cst);
    }
    ~Look() { lookers_.fetch_sub(1, std::memory_order_release); }
    Look(const Look&) = delete;
    Look& operator=(const Look&) = delete;
    const TableInForce& table() const noexcept { return *table_; }

   private:
    std::atomic<std::int32_t>& lookers_;
    const TableInForce* table_;
  };

  /// From now on every call abstains, and a waiting one goes on.
  void close() noexcept;
  /// Whether all calls have left after close().
  bool is_empty() const noexcept {
    return ended_.load(std::memory_order_acquire) == begun_.load(std::memory_order_acquire);
  }
  /// Make the next call take the slow path, where it can use NCCL's logger.
  void call_in() noexcept;

 private:
  friend struct Inspect;  // the tests' explorer

  std::uint64_t count() noexcept {
    const std::uint64_t call = begun_.load(std::memory_order_relaxed) + 1;
    begun_.store(call, std::memory_order_relaxed);
    return call;
  }
  bool passes(std::uint64_t call) const noexcept {
    return call < gate_.load(std::memory_order_acquire) &&
           ended_.load(std::memory_order_relaxed) + 1 == call;
  }
  void set_gate() noexcept;
  void drop(TableInForce* table) noexcept;
  Turn wait_for_decision(std::uint64_t now_ns) noexcept;

  // Written by the calling thread at every call.
  alignas(64) std::atomic<std::uint64_t> begun_{0};
  std::atomic<std::uint64_t> ended_{0};
  std::atomic<std::uint64_t> hash_{0};
  // These change rarely.
  alignas(64) std::atomic<std::uint64_t> gate_{kNever};
  std::atomic<TableInForce*> in_force_;
  const bool fences_;
  CallMarks own_marks_;  // nobody tells
  CallMarks* marks_ = &own_marks_;
  std::atomic<bool> waiting_{false};
  std::atomic<std::uint64_t> waited_ns_{0};
  std::atomic<bool> broken_{false};
  std::atomic<bool> is_closed_{false};
  mutable std::atomic<std::int32_t> lookers_{0};

  // Shared by the slow path and the agreement's thread.
  mutable Mutex mutex_;
  const std::uint64_t limit_ns_;
  bool failed_ = false;
  bool called_in_ = false;
  std::uint64_t stop_at_ = kNever;
  bool promised_ = false;  // the call at stop_at_ waits for the decision, and for nothing else
  TableInForce* staged_ = nullptr;
  TableInForce* dropped_ = nullptr;  // no longer in force, but perhaps still looked at
  std::uint64_t waited_since_ns_ = 0;

  std::atomic<std::uint64_t> hashes_[kHashSlots] = {};
};

}  // namespace dynamiccl
