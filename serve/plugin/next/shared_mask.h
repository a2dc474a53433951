// NCCL's one event mask, shared by two profilers: each has an int of its own, NCCL's holds both.
#pragma once

#include <atomic>

namespace dynamiccl {

/// Either may write its int at any time. NCCL's follows at the next event, of which there are some
/// for each call while ours or theirs wants any.
class SharedMask {
 public:
  /// The one for NCCL's int; null when a process has more NCCLs than anybody has seen.
  static SharedMask* of(int* nccl) noexcept;

  /// Whether ours wants events in this process, as its first communicator shows. If not, they have
  /// NCCL's int itself, so that their change from nothing to something is seen too.
  void settle(bool ours_wants_any) noexcept;

  /// Null when NCCL's int is theirs.
  int* ours() noexcept { return is_theirs() ? nullptr : &ours_; }
  int* theirs() noexcept { return is_theirs() ? nccl_.load(std::memory_order_relaxed) : &theirs_; }

  /// What they want of a call that NCCL reads its int for now: not what it does not hold yet, since
  /// a call is heard of as a whole or not at all.
  int wanted_by_them() const noexcept {
    return is_theirs() ? ~0 : taken_.load(std::memory_order_relaxed);
  }

  /// Make NCCL's int follow ours, and theirs too if `takes_theirs`: between NCCL's reading it for a
  /// call and that call's own event, they must not change.
  void follow(bool takes_theirs) noexcept;

 private:
  enum Settled : int { kOpen, kShared, kTheirs };

  bool is_theirs() const noexcept { return settled_.load(std::memory_order_relaxed) == kTheirs; }

  std::atomic<int*> nccl_{nullptr};
  std::atomic<int> settled_{kOpen};
  int ours_ = 0;
  int theirs_ = 0;
  std::atomic<int> taken_{0};  // of theirs, by NCCL's int
};

}  // namespace dynamiccl
