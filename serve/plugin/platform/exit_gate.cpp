#include "platform/exit_gate.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>

#include "platform/threads.h"

extern "C" {
// glibc 2.18. What it registers is run first of all in exit(), on the thread that calls exit().
extern void* __dso_handle;
int __cxa_thread_atexit_impl(void (*destroy)(void*), void* object, void* library);
}

namespace dynamiccl {
namespace {

constexpr std::uint64_t kLongestWaitNs = 2'000'000'000;
constexpr std::uint64_t kPauseNs = 1'000'000;
/// Until then a brain has been opened and has decided with all that it does, so that its static
/// objects are made.
constexpr int kTimesRegistered = 8;

std::atomic<bool> g_is_ending{false};
std::atomic<bool> g_is_busy{false};
std::atomic<bool> g_is_watched{false};
int g_num_registered = 0;  // of whoever is busy

void close_gate() noexcept {
  if (in_forked_child()) return;  // nobody is busy here
  g_is_ending.store(true);
  const std::uint64_t until_ns = monotonic_ns() + kLongestWaitNs;
  while (g_is_busy.load() && monotonic_ns() < until_ns) sleep_ns(kPauseNs);
}

}  // namespace

BeforeExit::BeforeExit() noexcept {
  g_is_busy.store(true);
  may_begin_ = !g_is_ending.load();
  if (!may_begin_) g_is_busy.store(false);
}

BeforeExit::~BeforeExit() {
  if (!may_begin_) return;
  if (g_num_registered < kTimesRegistered && std::atexit(close_gate) == 0) ++g_num_registered;
  g_is_busy.store(false);
}

void watch_exit() noexcept {
  if (g_is_watched.load(std::memory_order_relaxed)) return;
  if (syscall(SYS_gettid) != getpid() || g_is_watched.exchange(true)) return;
  __cxa_thread_atexit_impl([](void*) { close_gate(); }, nullptr, &__dso_handle);
}

}  // namespace dynamiccl
