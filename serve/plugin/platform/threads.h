// Threads and clocks of the plugin, without a symbol newer than glibc 2.28.
#pragma once

#include <pthread.h>

#include <cstdint>

namespace dynamiccl {

/// Start a thread with all signals blocked, so that none of the job's handlers runs on it;
/// `to_join` is for join_thread, and null for one that ends by itself. Returns false when the
/// system refuses.
bool start_thread(void* (*run)(void*), void* argument, const char* name,
                  pthread_t* to_join = nullptr) noexcept;

void join_thread(pthread_t thread) noexcept;

/// Whether this process was forked off one that had loaded the plugin: it has none of the threads.
bool in_forked_child() noexcept;

/// CLOCK_MONOTONIC; never 0.
std::uint64_t monotonic_ns() noexcept;

/// CLOCK_REALTIME.
std::uint64_t realtime_ns() noexcept;

void sleep_ns(std::uint64_t duration_ns) noexcept;

/// Mutex without a constructor that could throw, held by a Lock.
class Mutex {
 public:
  Mutex() = default;
  ~Mutex() = default;  // nothing to give back on Linux; threads outlive a process's own objects
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;

  void lock() noexcept { pthread_mutex_lock(&mutex_); }
  void unlock() noexcept { pthread_mutex_unlock(&mutex_); }

 private:
  pthread_mutex_t mutex_ = PTHREAD_MUTEX_INITIALIZER;
};

class Lock {
 public:
  explicit Lock(Mutex* mutex) noexcept : mutex_(mutex) { mutex_->lock(); }
  ~Lock() { mutex_->unlock(); }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

 private:
  Mutex* mutex_;
};

}  // namespace dynamiccl
