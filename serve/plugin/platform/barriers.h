// Memory barriers in all threads of a process, so that readers on the hot path need none.
#pragma once

#include <atomic>

#include "platform/threads.h"

namespace dynamiccl {

/// Waits, at most 200 ms, until other threads have left; returns whether they have.
template <typename Condition>
bool wait_until(const Condition& is_met) noexcept {
  constexpr int kTries = 200;
  constexpr std::uint64_t kPauseNs = 1'000'000;
  for (int i = 0; !is_met(); ++i) {
    if (i == kTries) return false;
    sleep_ns(kPauseNs);
  }
  return true;
}

/// Make every processor that runs a thread of this process pass a full memory barrier. Returns
/// false where the kernel cannot (before 4.14, or filtered): then the other side needs fences.
bool barrier_all_threads() noexcept;

/// A full memory barrier of this thread. ThreadSanitizer knows no fences, but it knows this.
inline void full_barrier() noexcept {
#if defined(__SANITIZE_THREAD__)
  static std::atomic<int> touched{0};
  touched.fetch_add(1, std::memory_order_seq_cst);
#else
  std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
}

}  // namespace dynamiccl
