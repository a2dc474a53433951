// A change is rare; the common step compares three ints.
#include "next/shared_mask.h"

namespace dynamiccl {
namespace {

constexpr int kMaxMasks = 32;
SharedMask g_masks[kMaxMasks];

}  // namespace

SharedMask* SharedMask::of(int* nccl) noexcept {
  for (SharedMask& candidate : g_masks) {
    int* taken = nullptr;
    if (candidate.nccl_.compare_exchange_strong(taken, nccl) || taken == nccl) return &candidate;
  }
  return nullptr;
}

void SharedMask::settle(bool ours_wants_any) noexcept {
  int open = kOpen;
  settled_.compare_exchange_strong(open, ours_wants_any ? kShared : kTheirs);
}

void SharedMask::follow(bool takes_theirs) noexcept {
  if (is_theirs()) return;
  int* const nccl = nccl_.load(std::memory_order_relaxed);
  while (true) {
    const int theirs = takes_theirs ? __atomic_load_n(&theirs_, __ATOMIC_SEQ_CST) : taken_.load();
    const int wanted = __atomic_load_n(&ours_, __ATOMIC_SEQ_CST) | theirs;
    if (taken_.load() == theirs && __atomic_load_n(nccl, __ATOMIC_SEQ_CST) == wanted) return;
    // Whoever stores looks again, so that the last to store has seen the last change.
    if (takes_theirs) taken_.store(theirs);
    __atomic_store_n(nccl, wanted, __ATOMIC_SEQ_CST);
  }
}

}  // namespace dynamiccl
