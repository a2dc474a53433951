// One Profiler per communicator makes a CallRecord of each collective from what NCCL tells. It
// changes nothing of what NCCL does, and never returns an error.
#pragma once

#include <atomic>
#include <cstdint>

#include "agree/stops.h"
#include "nccl/profiler_abi.h"
#include "profiler/recorder.h"
#include "vocabulary.h"

namespace dynamiccl {

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
