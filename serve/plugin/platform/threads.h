// Threads of the plugin, without a symbol newer than glibc 2.28.
#pragma once

#include "platform/clock.h"

namespace dynamiccl {

/// Start a thread that lives as long as the process, with all signals blocked, so that none of the
/// job's handlers runs on it. Its argument is null. Returns false when the system refuses.
bool start_thread(void* (*run)(void*)) noexcept;

/// Whether this process was forked off one that had loaded the plugin: it has none of the threads.
bool in_forked_child() noexcept;

/// Waits until other threads have left, say; returns whether they have.
template <typename Condition>
bool wait_until(const Condition& is_met, int limit_ms = 200) noexcept {
  constexpr std::uint64_t kNsPerMs = 1'000'000;
  for (int i = 0; !is_met(); ++i) {
    if (i == limit_ms) return false;
    sleep_ns(kNsPerMs);
  }
  return true;
}

/// CLOCK_REALTIME.
inline std::uint64_t realtime_ns() noexcept {
  timespec time;
  clock_gettime(CLOCK_REALTIME, &time);
  return static_cast<std::uint64_t>(time.tv_sec) * 1'000'000'000U +
         static_cast<std::uint64_t>(time.tv_nsec);
}

}  // namespace dynamiccl
