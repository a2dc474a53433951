// The profiler behind all ABI versions: one Profiler per communicator makes a CallRecord of each
// collective. It changes nothing of what NCCL does, and never returns an error.
//
// Environment (read once per communicator, at its creation):
//   DYNAMICCL_DISABLE         1: nothing is recorded.
//   DYNAMICCL_SAMPLE_PERCENT  share of calls whose GPU time is taken (bursts.h). Default 1.
// and those of recorder.h.
#pragma once

#include <atomic>
#include <cstdint>

#include "agree/marks.h"
#include "nccl/profiler_abi.h"
#include "platform/threads.h"
#include "profiler/bursts.h"
#include "profiler/recorder.h"
#include "vocabulary.h"

namespace dynamiccl {

/// What NCCL tells a profiler about a communicator.
struct ProfiledCommunicator {
  std::uint64_t comm_id;
  int rank;
  int num_ranks;
  int num_nodes;
  int* event_mask;                // of the whole process
  ncclDebugLogger_t logger;       // may be null
  bool has_launches;              // NCCL tells of launches and captures: from 2.28 on
  bool hides_broadcasts = false;  // but not of Broadcasts on their stream: from 2.29 on
};

/// Opaque to NCCL. Its memory is used again for a later communicator but never freed: a tuner may
/// hold it. Handles of events are numbers, not pointers: a late one names a generation that is
/// gone.
class Profiler {
 public:
  using Describe = Hook<CallRecord*>::Function;

  /// The profiler of a communicator; null when nothing is to be recorded. Either way the tuner that
  /// is created next on this thread can learn what NCCL told (created.h).
  static Profiler* create(const ProfiledCommunicator& communicator) noexcept;

  /// The communicator is going. What still waits for GPU times is recorded without.
  void finalize() noexcept;

  /// What is told about the calls. Like the profiler itself it is never freed.
  CallMarks* marks() noexcept { return &marks_; }

  /// Have `describe` complete each record (table, decided, probe), on the thread of the event. With
  /// null the old one is taken back: false when it was still running after 200 ms, and then `user`
  /// must be left alone for good.
  bool set_describe(Describe describe, void* user) noexcept {
    return describe_.set(describe, user);
  }

  /// Take the times of the calls from now on, or no longer beyond the bursts: for probes. Called on
  /// the communicator's own thread.
  void take_times(bool wanted) noexcept;

  /// A group of calls of the API, which may be of several communicators: NCCL tells the first one's
  /// profiler alone (2.30.7 `src/plugin/profiler.cc:275`), also where that one is null. Returns a
  /// handle for what comes below, another one for each group of the process.
  static void* start_group() noexcept;

  /// A collective of the API in that group.
  void* start_call(const ncclProfilerCollApi_v5_t& call, void* group) noexcept;

  /// The launch of a plan; before 2.28 what its collectives come below. Never null: without it 2.27
  /// starts no events of collectives.
  void* start_plan() noexcept;

  /// A plan of that group is launched, on the thread that called.
  void launch(void* group) noexcept { marks_.set_launched(group); }

  /// A collective was put on its stream; null when no more needs to be heard of it.
  void* start_collective(const ncclProfilerColl_v4_t& event, void* parent) noexcept;

  /// Sends and receives, which are not recorded, but cost as much while the mask is wide.
  void start_other() noexcept {
    if (mask_->is_wide()) mask_->count(true, sample_ppm_);
  }

  /// The rest is about handles alone.
  static void* start_kernel(void* parent, int channel, std::uint64_t gpu_ns) noexcept;
  static void stop_kernel(void* handle, std::uint64_t gpu_ns) noexcept;
  static void stop(void* handle) noexcept;

 private:
  template <typename T, typename... Arguments>
  friend T* allocate(Arguments&&...) noexcept;
  Profiler() = default;
  CallRecord record_of(int collective, std::size_t count, const char* datatype) const noexcept;
  void hear_of_broadcasts(const ncclProfilerCollApi_v5_t& call, void* group) noexcept;
  void record_held_broadcast() noexcept;

  CallMarks marks_;
  Profiler* next_free_ = nullptr;
  std::uint64_t comm_id_ = 0;
  int rank_ = 0;
  int num_ranks_ = 0;
  int num_nodes_ = 0;
  EventMask* mask_ = nullptr;
  std::uint32_t sample_ppm_ = 0;
  std::atomic<bool> takes_times_{false};                // of all calls
  std::atomic<std::uint64_t> latest_[kNumCollectives];  // sequence numbers; the bursts' owners
  Hook<CallRecord*> describe_;

  // Broadcasts that CollApi alone tells of. The latest is held until its group is complete.
  std::atomic<bool> hides_broadcasts_{false};
  std::atomic<bool> holds_broadcast_{false};
  Mutex mutex_;  // of what follows
  CallRecord held_ = {};
  void* held_group_ = nullptr;
  int held_root_ = 0;
  bool has_many_roots_ = false;  // held_group_ has
  std::uint64_t num_broadcasts_ = 0;
};

}  // namespace dynamiccl
