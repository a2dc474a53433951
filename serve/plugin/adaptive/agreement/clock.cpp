// What happens at the gate, and how it is set.
#include "adaptive/agreement/clock.h"

#include <algorithm>

namespace dynamiccl {

Clock::Clock(std::uint64_t limit_ns) noexcept
    : in_force_(TableInForce::abstaining(0)), fences_(!barrier_all_threads()), limit_ns_(limit_ns) {
  // Without memory for a table nothing may be looked up.
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
  std::uint64_t gate = muster_at_;
  const bool is_closed = is_closed_.load(std::memory_order_relaxed);
  if (is_closed || failed_ || called_in_ || staged_ != nullptr) gate = 0;
  gate_.store(gate, std::memory_order_seq_cst);
}

/// It is no longer in force: nobody who looks from now on will find it.
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
  // In the middle of a group, a rank that has simulated one could stand beside ranks that have not.
  const bool begins_group = marks_->begins_group();
  if (ended_.load(std::memory_order_relaxed) + 1 != call) {
    // Two calls at once: NCCL forbids it to its users. The count is lost on this rank alone, so it
    // must never vote again; what is in force goes on, since the other ranks go on with it.
    broken_.store(true, std::memory_order_relaxed);
    ended_.store(call - 1, std::memory_order_relaxed);
  }
  if (staged_ != nullptr) {
    // The call that waited, or one before it should the leader ever break its word.
    TableInForce* before = in_force_.load(std::memory_order_relaxed);
    in_force_.store(staged_, std::memory_order_seq_cst);
    drop(before);
    staged_ = nullptr;
  } else if (call >= muster_at_ && begins_group) {
    const Turn turn = wait_for_decision(now_ns);
    if (turn == Turn::kWait) return turn;
    if (turn == Turn::kFail) {
      failed_ = true;
      set_gate();
      return turn;
    }
    muster_at_ = kNever;  // nobody has been promised anything
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

bool Clock::muster(std::uint64_t at) noexcept {
  const Lock lock(&mutex_);
  if (is_closed_.load(std::memory_order_relaxed) || failed_ || staged_ != nullptr) return false;
  if (muster_at_ != kNever || broken_.load(std::memory_order_relaxed)) return false;
  muster_at_ = at;
  waited_since_ns_ = 0;
  set_gate();
  // Now every call that has not begun yet will see the gate, and every one that has is counted.
  if (!fences_) barrier_all_threads();
  full_barrier();
  if (begun_.load(std::memory_order_relaxed) < at) return true;
  muster_at_ = kNever;
  set_gate();
  return false;
}

bool Clock::vote(std::uint64_t* hash, std::uint64_t* call) noexcept {
  const Lock lock(&mutex_);
  *call = begun_.load(std::memory_order_relaxed);
  const bool waits = muster_at_ != kNever && waiting_.load(std::memory_order_relaxed) &&
                     *call >= muster_at_ && !failed_ && !is_closed_.load(std::memory_order_relaxed);
  if (!waits) return false;
  promised_ = true;
  *hash = hash_.load(std::memory_order_relaxed);
  return true;
}

void Clock::commit(TableInForce* next) noexcept {
  const Lock lock(&mutex_);
  muster_at_ = kNever;
  promised_ = false;
  if (staged_ != nullptr) staged_->let_go();
  staged_ = next;
  set_gate();
}

void Clock::abandon() noexcept {
  const Lock lock(&mutex_);
  muster_at_ = kNever;
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
  // As in muster(): what is_empty() reads afterwards has every call in it that did not see the
  // gate.
  if (!fences_) barrier_all_threads();
  full_barrier();
}

void Clock::call_in() noexcept {
  const Lock lock(&mutex_);
  called_in_ = true;
  set_gate();
}

}  // namespace dynamiccl
