// Some of glibc's functions got a new version when they moved into libc (2.32 to 2.34). Asking for
// the old version makes the library load on either side of the move.
#include "platform/threads.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>

#include "platform/old_symbols.h"

DYNAMICCL_OLD_SYMBOL(pthread_attr_setstacksize);
DYNAMICCL_OLD_SYMBOL(pthread_create);
DYNAMICCL_OLD_SYMBOL(pthread_detach);
DYNAMICCL_OLD_SYMBOL(pthread_join);

namespace dynamiccl {
namespace {

/// glibc takes the process's static thread-local memory, some hundred KiB with many libraries, from
/// each thread's stack. As much as its default: only pages that are used take memory.
constexpr std::size_t kStackBytes = 8 * 1024 * 1024;

struct Start {
  void* (*run)(void*);
  void* argument;
  const char* name;
  std::atomic<bool> taken;
};

void* begin(void* argument) {
  auto* start = static_cast<Start*>(argument);
  prctl(PR_SET_NAME, start->name);
  void* (*run)(void*) = start->run;
  void* run_argument = start->argument;
  start->taken.store(true, std::memory_order_release);
  return run(run_argument);
}

std::atomic<bool> g_forked{false};

void note_fork() { g_forked.store(true, std::memory_order_relaxed); }

/// Registered when the library is loaded: later would be too late for a fork in between.
__attribute__((constructor)) void watch_forks() { pthread_atfork(nullptr, nullptr, note_fork); }

}  // namespace

bool start_thread(void* (*run)(void*), void* argument, const char* name,
                  pthread_t* to_join) noexcept {
  Start start = {run, argument, name, {false}};
  pthread_attr_t attributes;
  if (pthread_attr_init(&attributes) != 0) return false;
  pthread_attr_setstacksize(&attributes, kStackBytes);
  sigset_t all, before;
  sigfillset(&all);
  sigprocmask(SIG_SETMASK, &all, &before);  // on Linux: of the calling thread, and inherited
  pthread_t thread;
  const int result = pthread_create(&thread, &attributes, begin, &start);
  sigprocmask(SIG_SETMASK, &before, nullptr);
  pthread_attr_destroy(&attributes);
  if (result != 0) return false;
  while (!start.taken.load(std::memory_order_acquire)) sleep_ns(10'000);
  if (to_join != nullptr) {
    *to_join = thread;
  } else {
    pthread_detach(thread);
  }
  return true;
}

void join_thread(pthread_t thread) noexcept { pthread_join(thread, nullptr); }

bool in_forked_child() noexcept { return g_forked.load(std::memory_order_relaxed); }

std::uint64_t realtime_ns() noexcept {
  timespec time;
  clock_gettime(CLOCK_REALTIME, &time);
  return static_cast<std::uint64_t>(time.tv_sec) * 1'000'000'000U +
         static_cast<std::uint64_t>(time.tv_nsec);
}

}  // namespace dynamiccl
