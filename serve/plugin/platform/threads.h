// What libraries need that record calls: threads of others, processes, and the clock of events.
#pragma once

#include <unistd.h>

#include "platform/clock.h"

namespace dynamiccl {

/// As of when the library was loaded: later would be too late for a fork in between.
inline const pid_t g_process = getpid();

/// Whether this process was forked off one that had loaded the plugin: it has none of the threads.
inline bool in_forked_child() noexcept { return getpid() != g_process; }

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
