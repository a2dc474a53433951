// One Profiler per communicator makes a CallRecord of each collective from what NCCL tells, and the
// Recorder of the process keeps them. They change nothing of what NCCL does, and never return an
// error.
#pragma once

#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "agree/stops.h"
#include "nccl/profiler_abi.h"
#include "platform/system.h"
#include "vocabulary.h"

namespace dynamiccl {

/// As of when the library was loaded: later would be too late for a fork in between.
inline const pid_t g_process = getpid();

/// Whether this process was forked off one that had loaded the plugin: it has none of the threads.
inline bool in_forked_child() noexcept { return getpid() != g_process; }

/// Waits until other threads have left, say; returns whether they have within 2 s.
template <typename Condition>
bool wait_until(const Condition& is_met) noexcept {
  constexpr int kLimitMs = 2'000;
  constexpr std::uint64_t kNsPerMs = 1'000'000;
  for (int i = 0; !is_met(); ++i) {
    if (i == kLimitMs) return false;
    sleep_ns(kNsPerMs);
  }
  return true;
}

/// Bits of CallRecord::flags.
inline constexpr std::uint8_t kFlagCaptured = 1;    // captured in a CUDA graph
inline constexpr std::uint8_t kFlagIncomplete = 2;  // some KernelCh events were lost: no GPU times
inline constexpr std::uint8_t kFlagProbe = 4;       // a probe of NCCL's own choice

/// A number that NCCL gave a name which is not in the vocabulary.
inline constexpr std::uint8_t kUnknown = 255;

/// One collective call on one rank.
struct CallRecord {
  std::uint64_t comm_id;      // commId, commHash before 2.28
  std::uint64_t sequence;     // NCCL's seqNumber: per communicator and collective
  std::uint64_t size_bytes;   // NCCL's nBytes, as a tuner gets it
  std::uint64_t enqueued_ns;  // CLOCK_REALTIME when NCCL began the event
  std::uint64_t start_ns;     // GPU globaltimer, least of all channels; 0: not sampled
  std::uint64_t stop_ns;      // largest of all channels; 0: not sampled
  std::int32_t rank;
  std::int32_t num_ranks;
  std::int32_t num_nodes;
  std::uint32_t table;  // number of the table in force; 0: NCCL's own choice everywhere
  std::uint8_t collective;
  std::uint8_t algorithm;
  std::uint8_t protocol;
  std::uint8_t num_channels;
  std::uint8_t num_warps;
  std::uint8_t datatype;  // ncclDataType_t
  std::uint8_t decided;   // 1: our table asked for this config, 0: NCCL's own
  std::uint8_t flags;
};
static_assert(sizeof(CallRecord) == 72 && offsetof(CallRecord, collective) == 64,
              "as in the calls files, byte for byte");

/// Takes records from all communicators and writes calls files. Its variables are read when a
/// communicator comes, until the first files are begun. It has a thread once calls files are asked
/// for, until the process ends.
struct Recorder {
  /// A communicator has come. Null, or why no calls files are written though they were asked for.
  /// Their headers say the sampled share, and of which NCCL `logger` is.
  static const char* acquire(std::uint32_t sample_ppm, ncclDebugLogger_t logger) noexcept;

  /// A communicator has gone. With the last one all is written, if that takes no more than 2 s.
  static void release() noexcept;

  /// Whether files are written. When not, records are not taken.
  static bool is_on() noexcept;

  /// From any thread; waits for no file.
  static void push(const CallRecord& record) noexcept;
};

/// Parts per million of a text such as "1", "0.25" or "100"; -1 when it is not from 0 to 100.
int sample_ppm_of(const char* percent) noexcept;

/// Its memory is used again but never freed: a tuner may hold it.
struct Profiler {
  /// Take the times of the calls from now on, or no longer beyond the bursts: for probes. Called on
  /// the communicator's own thread.
  void take_times(bool wanted) noexcept;

  CallMarks call_marks;   // what is told about the calls
  void* tuner = nullptr;  // the tuner's alone, for its hooks
  Profiler* next_free = nullptr;
  CallRecord blank = {};  // what is the same in all
  int* mask = nullptr;    // NCCL's, of the whole process
  std::uint32_t sample_ppm = 0;
  std::atomic<bool> takes_times{false};                // of all calls
  std::atomic<std::uint64_t> latest[kNumCollectives];  // sequence numbers; the bursts' owners

  // Broadcasts that CollApi alone tells of. The latest is held until its group is complete.
  std::atomic<bool> hides_broadcasts{false}, holds_broadcast{false};
  CallRecord held = {};  // with what follows, under profiler.cpp's mutex
  void* held_group = nullptr;
  int held_root = 0;  // -1: held_group has several
};

/// What a tuner has to do with the records of all communicators. Called on the thread of the event,
/// NCCL's proxy's among them; they must not block, nor call a profiler.
struct Hooks {
  /// Completes a record: table, decided, probe.
  void (*describe)(const Profiler& of, CallRecord* record);
  void (*take)(const Profiler& of, const CallRecord& record);
};
inline std::atomic<const Hooks*> g_hooks{nullptr};  // once there are any, for good

/// Of this thread's latest profiler init, until a tuner has taken it; null: it records nothing.
/// NCCL creates a communicator's tuner next on the same thread, and tells it neither rank nor,
/// before 2.28, id (`src/init.cc`, ncclCommInitRankFunc, 2.28.9 to 2.30.7). So ranks of one
/// communicator that share a process are not mixed up.
inline thread_local Profiler* t_created = nullptr;

/// Once, and only if it is of that communicator: else a tuner was never created for it.
inline Profiler* take_created(std::uint64_t comm_id) noexcept {
  Profiler* const created = t_created;
  t_created = nullptr;
  return created != nullptr && created->blank.comm_id == comm_id ? created : nullptr;
}

}  // namespace dynamiccl
