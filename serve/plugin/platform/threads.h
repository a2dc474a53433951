// Threads of the plugin, without a symbol newer than glibc 2.28.
#pragma once

#include <pthread.h>

#include <cstdint>

#include "platform/clock.h"

namespace dynamiccl {

/// Start a thread with all signals blocked, so that none of the job's handlers runs on it;
/// `to_join` is for join_thread, and null for one that ends by itself. Returns false when the
/// system refuses.
bool start_thread(void* (*run)(void*), void* argument, const char* name,
                  pthread_t* to_join = nullptr) noexcept;

void join_thread(pthread_t thread) noexcept;

/// Whether this process was forked off one that had loaded the plugin: it has none of the threads.
bool in_forked_child() noexcept;

/// CLOCK_REALTIME.
std::uint64_t realtime_ns() noexcept;

}  // namespace dynamiccl
