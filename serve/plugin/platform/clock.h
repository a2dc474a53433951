// Clocks, random numbers, a mutex and objects on the heap, without a symbol newer than glibc 2.28
// and where neither new nor delete can be had: see CMakeLists.txt.
#pragma once

#include <pthread.h>
#include <sys/random.h>
#include <time.h>

#include <cstdint>
#include <cstdlib>
#include <new>

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
