// NCCL's logger as the plugin is given it, and which threads may call it. NCCL's proxy thread, as
// far as a profiler sees it: KernelCh events that come late, out of order, twice or never, and the
// host tasks of replayed CUDA graphs.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <thread>

#include "tests/job/plugin_calls.h"

/// Who is told what the plugin does; called from any thread.
class Witness {
 public:
  virtual ~Witness() = default;
  virtual void log(int level, const std::string& line) = 0;
  /// The plugin did what NCCL does not survive, or what the project's law forbids.
  virtual void violation(const std::string& what) = 0;
  virtual void asked(std::uint64_t took_ns) = 0;
  virtual void created(std::uint64_t took_ns) = 0;
};

/// Where the logger's lines go; null drops them.
void set_witness(Witness* witness);

/// Marks the calling thread as the job's: from a thread of the plugin's own the logger must not be
/// called, since it may make CUDA calls.
void adopt_thread();

/// ncclDebugLogger_t.
void nccl_log(ncclDebugLogLevel level, unsigned long flags, const char* file, int line,
              const char* format, ...);

struct ProxyHabits {
  int delay_us = 0;           // up to so much after the kernel's end
  int drop_percent = 0;       // of channels: no event at all, or a start that is never stopped
  int duplicate_percent = 0;  // of channels
};

/// The kernel of one collective, on all its channels.
struct Kernel {
  const ProfilerCalls* profiler;
  void* context;
  void* collective;
  int num_channels;
  std::uint64_t start_ns;
  std::uint64_t stop_ns;
};

class Proxy {
 public:
  Proxy(const ProxyHabits& habits, std::uint64_t seed);
  ~Proxy();
  Proxy(const Proxy&) = delete;
  Proxy& operator=(const Proxy&) = delete;

  /// `owner` is any address that stands for the communicator.
  void deliver(const void* owner, const Kernel& kernel);
  void run(const void* owner, std::function<void()> task);

  /// Waits until nothing of `owner` is left. What has not been delivered yet is, or is not.
  void finish(const void* owner, bool deliver_rest);

 private:
  struct Item {
    const void* owner;
    std::function<void()> task;
  };

  void loop();
  void add(const void* owner, std::uint64_t due_ns, std::function<void()> task);

  const ProxyHabits habits_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::mt19937_64 random_;
  std::multimap<std::uint64_t, Item> queue_;  // by the time when it is due
  const void* busy_with_ = nullptr;
  bool stopped_ = false;
  std::thread thread_;
};

/// CLOCK_MONOTONIC, here also the GPU's clock.
std::uint64_t now_ns();
