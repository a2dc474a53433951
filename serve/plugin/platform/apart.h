// Runs work on a separate thread with a time limit: files and name servers may stall.
#pragma once

#include <atomic>

#include "platform/allocate.h"
#include "platform/threads.h"

namespace dynamiccl {

/// Runs `work->run()` on a copy of `*work`, waits for it, `limit_ms` at most, and copies it back;
/// false where it took longer, or memory or threads are short. The copy of a late one is freed when
/// it ends. So `Work` holds no pointer to what whoever waits may give up.
template <typename Work>
bool run_apart(Work* work, const char* name, std::uint64_t limit_ms) noexcept {
  struct Shared {
    explicit Shared(const Work& given) noexcept : work(given) {}
    static void let_go(Shared* shared) noexcept {
      if (shared->holders.fetch_sub(1) == 1) deallocate(shared);
    }
    Work work;
    std::atomic<bool> is_done{false};
    std::atomic<int> holders{2};
  };
  constexpr std::uint64_t kFirstPauseNs = 50'000, kMostPauseNs = 20'000'000, kNsPerMs = 1'000'000;
  auto* shared = allocate<Shared>(*work);
  if (shared == nullptr) return false;
  const auto run = [](void* argument) -> void* {
    auto* own = static_cast<Shared*>(argument);
    own->work.run();
    own->is_done.store(true, std::memory_order_release);
    Shared::let_go(own);
    return nullptr;
  };
  if (!start_thread(run, shared, name)) {
    deallocate(shared);
    return false;
  }
  const std::uint64_t until_ns = monotonic_ns() + limit_ms * kNsPerMs;
  bool is_done = false;
  // Poll more slowly with time: hundreds of ranks in one process would otherwise use up its cores.
  std::uint64_t pause_ns = kFirstPauseNs;
  while (!(is_done = shared->is_done.load(std::memory_order_acquire)) &&
         monotonic_ns() < until_ns) {
    sleep_ns(pause_ns);
    if (pause_ns < kMostPauseNs) pause_ns *= 2;
  }
  if (is_done) *work = shared->work;
  Shared::let_go(shared);
  return is_done;
}

}  // namespace dynamiccl
