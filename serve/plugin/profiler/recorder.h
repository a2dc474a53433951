// The recorder of this process: takes records from all communicators, writes calls files and feeds
// a sink.
//
// Environment (read when a communicator comes, until the first files are begun):
//   DYNAMICCL_CALLS_DIR      directory for the calls files. Default: none are written.
//   DYNAMICCL_CALLS_MAX_MIB  disk that this process's files may take. Default 256.
//   DYNAMICCL_MACHINE        this machine, as dynamiccl-run found it. Default: not known.
#pragma once

#include <atomic>
#include <cstdint>

#include "nccl/tuner_abi.h"
#include "platform/threads.h"
#include "profiler/record.h"

namespace dynamiccl {

/// A function of the tuner's that events call, and that can be taken back while they do.
template <typename Record>
class Hook {
 public:
  using Function = void (*)(void* user, Record record);

  /// False when the old function was still running after 200 ms: then its `user` must be left alone
  /// for good, and there is no new one.
  bool set(Function function, void* user) noexcept {
    function_.store(nullptr);
    if (!wait_until([this] { return inside_.load() == 0; })) return false;
    user_.store(user, std::memory_order_relaxed);
    function_.store(function);
    return true;
  }

  bool is_set() const noexcept { return function_.load(std::memory_order_relaxed) != nullptr; }

  void call(Record record) noexcept {
    if (!is_set()) return;
    inside_.fetch_add(1);
    const Function function = function_.load();
    if (function != nullptr) function(user_.load(std::memory_order_relaxed), record);
    inside_.fetch_sub(1, std::memory_order_release);
  }

 private:
  std::atomic<Function> function_{nullptr};
  std::atomic<void*> user_{nullptr};
  std::atomic<int> inside_{0};
};

/// All counts are since the process began.
struct RecorderCounters {
  std::uint64_t taken;    // records
  std::uint64_t dropped;  // the ring was full
  std::uint64_t written;  // are in a file
  std::uint64_t lost;     // could not be written: the disk is full, say
};

/// One a process. It has a thread once calls files are asked for, until the process ends. Nothing
/// is done in a forked child.
class Recorder {
 public:
  /// Called on the thread of the event, NCCL's proxy's among them; must not block, nor call the
  /// recorder.
  using Sink = Hook<const CallRecord&>::Function;

  /// A communicator has come. Null, or why no calls files are written though they were asked for.
  /// `sample_ppm` is what their headers say of the sampled share; `logger` tells which NCCL it is.
  static const char* acquire(std::uint32_t sample_ppm, ncclDebugLogger_t logger) noexcept;

  /// A communicator has gone. With the last one all is written; a file system that hangs is waited
  /// for no longer than kFlushLimitNs.
  static void release() noexcept;

  /// Hand each record to `sink` as well; null: no longer, and when this returns it is not running.
  static void set_sink(Sink sink, void* user) noexcept { s_sink.set(sink, user); }

  /// Whether anybody takes records. When not, they need not be made.
  static bool is_on() noexcept {
    return s_writes.load(std::memory_order_relaxed) || s_sink.is_set();
  }

  /// From any thread; waits for nothing.
  static void push(const CallRecord& record) noexcept;

  static RecorderCounters counters() noexcept;

 private:
  static constexpr std::uint64_t kFlushLimitNs = 2'000'000'000;

  static std::atomic<bool> s_writes;
  static Hook<const CallRecord&> s_sink;
};

}  // namespace dynamiccl
