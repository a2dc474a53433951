// Some of glibc's functions got a new version when they moved into libc (2.32 to 2.34). Asking for
// the old version makes the library load on either side of the move.
#include "platform/threads.h"

#include <signal.h>
#include <unistd.h>

#include "platform/old_symbols.h"

DYNAMICCL_OLD_SYMBOL(pthread_attr_setstacksize);
DYNAMICCL_OLD_SYMBOL(pthread_create);
DYNAMICCL_OLD_SYMBOL(pthread_detach);

namespace dynamiccl {
namespace {

/// glibc takes the process's static thread-local memory, some hundred KiB with many libraries, from
/// each thread's stack. As much as its default: only pages that are used take memory.
constexpr std::size_t kStackBytes = 8 * 1024 * 1024;

/// As of when the library was loaded: later would be too late for a fork in between.
const pid_t g_process = getpid();

}  // namespace

bool start_thread(void* (*run)(void*)) noexcept {
  pthread_attr_t attributes;
  if (pthread_attr_init(&attributes) != 0) return false;
  pthread_attr_setstacksize(&attributes, kStackBytes);
  sigset_t all, before;
  sigfillset(&all);
  sigprocmask(SIG_SETMASK, &all, &before);  // on Linux: of the calling thread, and inherited
  pthread_t thread;
  const int result = pthread_create(&thread, &attributes, run, nullptr);
  sigprocmask(SIG_SETMASK, &before, nullptr);
  pthread_attr_destroy(&attributes);
  if (result == 0) pthread_detach(thread);
  return result == 0;
}

bool in_forked_child() noexcept { return getpid() != g_process; }

}  // namespace dynamiccl
