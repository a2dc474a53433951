// The slow path of a call at the gate, and the staging of a switch.
#include "adaptive/agreement/clock.h"

#include <algorithm>

namespace dynamiccl {

Clock::Clock(std::uint64_t limit_ns) noexcept
    : in_force_(TableInForce::abstaining(0)), fences_(!barrier_all_threads()), limit_ns_(limit_ns) {
  // Without memory for a table no look-up may happen.
  if (in_force_.load(std::memory_order_relaxed) == nullptr) is_closed_.store(true);
  const Lock lock(&mutex_);
  set_gate();
}

Clock::~Clock() {
  if (staged_ != nullptr) staged_->let_go();
  TableInForce* in_force = in_force_.load(std::memory_order_relaxed);
  if (in_force != nullptr) in_force->let_go();
  while (dropped_ != nullptr) {
    TableInForce* next = dropped_->next_dropped;
    dropped_->let_go();
    dropped_ = next;
  }
}

void Clock::set_gate() noexcept {
  std::uint64_t gate = stop_at_;
  const bool is_closed = is_closed_.load(std::memory_order_relaxed);
  if (is_closed || failed_ || called_in_ || staged_ != nullptr) gate = 0;
  gate_.store(gate, std::memory_order_seq_cst);
}

/// Removes the table from force: no later look-up finds it.
void Clock::drop(TableInForce* table) noexcept {
  table->next_dropped = dropped_;
  dropped_ = table;
  if (lookers_.load(std::memory_order_seq_cst) != 0) return;  // the next one frees both
  while (dropped_ != nullptr) {
    TableInForce* next = dropped_->next_dropped;
    dropped_->let_go();
    dropped_ = next;
  }
}

Clock::Turn Clock::wait_for_decision(std::uint64_t now_ns) noexcept {
  if (waited_since_ns_ == 0) waited_since_ns_ = now_ns;
  waiting_.store(true, std::memory_order_relaxed);
  if (now_ns - waited_since_ns_ < limit_ns_) return Turn::kWait;
  return promised_ ? Turn::kFail : Turn::kGo;
}

Clock::Turn Clock::turn(std::uint64_t now_ns) noexcept {
  const Lock lock(&mutex_);
  const std::uint64_t call = begun_.load(std::memory_order_relaxed);
  if (is_closed_.load(std::memory_order_relaxed)) return Turn::kAbstain;
  if (failed_) return Turn::kFail;
  called_in_ = false;
  // In the middle of a group, a rank that simulated a group could stop beside ranks that did not.
  const bool begins_group = marks_->begins_group();
  if (ended_.load(std::memory_order_relaxed) + 1 != call) {
    // Two concurrent calls on one communicator: NCCL forbids it. This rank's count is no longer
    // valid, so it must never vote again; the table in force stays, since the other ranks keep it.
    broken_.store(true, std::memory_order_relaxed);
    ended_.store(call - 1, std::memory_order_relaxed);
  }
  if (staged_ != nullptr) {
    // The call that waited, or an earlier one if the leader ever violates the protocol.
    TableInForce* before = in_force_.load(std::memory_order_relaxed);
    in_force_.store(staged_, std::memory_order_seq_cst);
    drop(before);
    staged_ = nullptr;
  } else if (call >= stop_at_ && begins_group) {
    const Turn turn = wait_for_decision(now_ns);
    if (turn == Turn::kWait) return turn;
    if (turn == Turn::kFail) {
      failed_ = true;
      set_gate();
      return turn;
    }
    stop_at_ = kNever;  // nobody has been promised anything
  }
  if (waiting_.exchange(false, std::memory_order_relaxed)) {
    waited_ns_.fetch_add(now_ns - waited_since_ns_, std::memory_order_relaxed);
  }
  set_gate();
  return Turn::kGo;
}

bool Clock::hash_after(std::uint64_t calls, std::uint64_t* hash) const noexcept {
  if (calls % kHashEvery != 0 || calls > ended_.load(std::memory_order_acquire)) return false;
  *hash = 0;
  if (calls == 0) return true;
  *hash = hashes_[(calls - 1) / kHashEvery % kHashSlots].load(std::memory_order_relaxed);
  full_barrier();
  // The slot is written anew from call `calls` + kHashReach + 1 on.
  return begun_.load(std::memory_order_relaxed) <= calls + kHashReach;
}

bool Clock::prepare(std::uint64_t at) noexcept {
  const Lock lock(&mutex_);
  if (is_closed_.load(std::memory_order_relaxed) || failed_ || staged_ != nullptr) return false;
  if (stop_at_ != kNever || broken_.load(std::memory_order_relaxed)) return false;
  stop_at_ = at;
  waited_since_ns_ = 0;
  set_gate();
  // From here on every call that has not begun sees the gate, and every one that has is counted.
  if (!fences_) barrier_all_threads();
  full_barrier();
  if (begun_.load(std::memory_order_relaxed) < at) return true;
  stop_at_ = kNever;
  set_gate();
  return false;
}

bool Clock::vote(std::uint64_t* hash, std::uint64_t* call) noexcept {
  const Lock lock(&mutex_);
  *call = begun_.load(std::memory_order_relaxed);
  const bool waits = stop_at_ != kNever && waiting_.load(std::memory_order_relaxed) &&
                     *call >= stop_at_ && !failed_ && !is_closed_.load(std::memory_order_relaxed);
  if (!waits) return false;
  promised_ = true;
  *hash = hash_.load(std::memory_order_relaxed);
  return true;
}

void Clock::commit(TableInForce* next) noexcept {
  const Lock lock(&mutex_);
  stop_at_ = kNever;
  promised_ = false;
  if (staged_ != nullptr) staged_->let_go();
  staged_ = next;
  set_gate();
}

void Clock::abandon() noexcept {
  const Lock lock(&mutex_);
  stop_at_ = kNever;
  promised_ = false;
  set_gate();
}

std::uint32_t Clock::table_number() const noexcept {
  const Lock lock(&mutex_);
  return in_force_.load(std::memory_order_relaxed)->number;
}

void Clock::close() noexcept {
  const Lock lock(&mutex_);
  is_closed_.store(true, std::memory_order_seq_cst);
  set_gate();
  // As in prepare(): is_empty() then counts every call that did not see the gate.
  if (!fences_) barrier_all_threads();
  full_barrier();
}

void Clock::call_in() noexcept {
  const Lock lock(&mutex_);
  called_in_ = true;
  set_gate();
}

}  // namespace dynamiccl
