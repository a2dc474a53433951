// What the libraries have in place of the C++ runtime and of newer glibc (2.28 has all symbols):
// clocks, random numbers, a mutex, objects on the heap.
#pragma once

#include <pthread.h>
#include <sys/random.h>
#include <time.h>

#include <cstdint>
#include <cstdlib>
#include <new>

// Asks the linker for the first version of a glibc function, which every glibc still has.
#if defined(__x86_64__)
#define DYNAMICCL_OLD_GLIBC "GLIBC_2.2.5"
#elif defined(__aarch64__)
#define DYNAMICCL_OLD_GLIBC "GLIBC_2.17"
#else
#error "not built on this processor yet: name the glibc release that first supported it"
#endif

// The sanitizers put their own functions in place of these, and those have no versions.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define DYNAMICCL_OLD_SYMBOL(name) static_assert(true, "")
#else
#define DYNAMICCL_OLD_SYMBOL(name) __asm__(".symver " #name "," #name "@" DYNAMICCL_OLD_GLIBC)
#endif

namespace dynamiccl {

inline std::uint64_t ns_of(clockid_t clock) noexcept {
  timespec time;
  clock_gettime(clock, &time);
  return static_cast<std::uint64_t>(time.tv_sec) * 1'000'000'000U +
         static_cast<std::uint64_t>(time.tv_nsec);
}
inline std::uint64_t monotonic_ns() noexcept { return ns_of(CLOCK_MONOTONIC) | 1; }  // never 0
inline std::uint64_t monotonic_ms() noexcept { return monotonic_ns() / 1'000'000U; }

inline void sleep_ns(std::uint64_t duration_ns) noexcept {
  const timespec pause = {static_cast<time_t>(duration_ns / 1'000'000'000U),
                          static_cast<long>(duration_ns % 1'000'000'000U)};
  nanosleep(&pause, nullptr);
}

/// A random number, never 0; of the clock where the kernel has none yet, or a filter forbids it.
inline std::uint64_t draw() noexcept {
  std::uint64_t number = monotonic_ns();
  [[maybe_unused]] const ssize_t got = getrandom(&number, sizeof number, GRND_NONBLOCK);
  return number | 1;
}

/// Without a constructor that could throw, or a destructor: threads outlive static objects.
struct Mutex {
  pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
};

struct Lock {
  explicit Lock(Mutex* taken) noexcept : held(taken) { pthread_mutex_lock(&held->mutex); }
  ~Lock() { pthread_mutex_unlock(&held->mutex); }
  Lock(const Lock&) = delete;
  Mutex* held;
};

/// Null when memory is short.
template <typename T, typename... Arguments>
T* allocate(Arguments&&... arguments) noexcept {
  void* memory = std::malloc(sizeof(T));
  return memory != nullptr ? new (memory) T(arguments...) : nullptr;
}

template <typename T>
void deallocate(T* object) noexcept {
  if (object == nullptr) return;
  object->~T();
  std::free(object);
}

}  // namespace dynamiccl
