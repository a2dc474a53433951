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

#include "adaptive/agreement/marks.h"
#include "nccl/profiler_abi.h"
#include "profiler/bursts.h"
#include "profiler/pending.h"
#include "profiler/record.h"
#include "vocabulary.h"

namespace dynamiccl {

/// What NCCL tells a profiler about a communicator.
struct ProfiledCommunicator {
  std::uint64_t comm_id;
  int rank;
  int num_ranks;
  int num_nodes;
  int* event_mask;           // of the whole process
  ncclDebugLogger_t logger;  // may be null
  bool has_launches;         // NCCL tells of launches and captures: from 2.28 on
};

/// Opaque to NCCL. Its memory is used again for a later communicator but never freed: events of the
/// proxy's thread may come at any time. Their handles are numbers, not pointers: a late one names a
/// generation that is gone.
class Profiler {
 public:
  using Describe = void (*)(void* user, CallRecord* record);

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
  bool set_describe(Describe describe, void* user) noexcept;

  /// Take the times of the calls from now on, or no longer beyond the bursts: for probes. Called on
  /// the communicator's own thread.
  void take_times(bool wanted) noexcept;

  /// A group of calls of the API, which may be of several communicators: NCCL tells the first one's
  /// profiler alone (2.30.7 `src/plugin/profiler.cc:275`), also where that one is null. Returns a
  /// handle for what comes below, another one for each group of the process.
  static void* start_group() noexcept;

  /// A collective of the API in that group, or before 2.28 the launch of a plan.
  void* start_call(bool is_plan, bool is_captured, void* group) noexcept;

  /// A plan of that group is launched, on the thread that called.
  void launch(void* group) noexcept { marks_.set_launched(group); }

  /// A collective was put on its stream; null when no more needs to be heard of it.
  void* start_collective(const ncclProfilerColl_v4_t& event, void* parent) noexcept;

  /// Anything else that the wide mask brings along.
  void start_other() noexcept;

  /// The rest is about handles alone.
  static void* start_kernel(void* parent, int channel, std::uint64_t gpu_ns) noexcept;
  static void stop_kernel(void* handle, std::uint64_t gpu_ns) noexcept;
  static void stop(void* handle) noexcept;

 private:
  Profiler() = default;
  static Profiler* take_free() noexcept;
  void describe(CallRecord* record) noexcept;

  CallMarks marks_;
  std::uint32_t index_ = 0;  // in the process's table of profilers
  bool is_taken_ = false;    // under the table's mutex
  std::uint64_t comm_id_ = 0;
  int rank_ = 0;
  int num_ranks_ = 0;
  int num_nodes_ = 0;
  EventMask* mask_ = nullptr;
  std::uint32_t sample_ppm_ = 0;
  std::uint64_t period_ = 0;
  std::uint32_t probe_epoch_ = 0;                       // 0: no probe holds the mask
  std::atomic<std::uint64_t> latest_[kNumCollectives];  // sequence numbers
  Bursts bursts_[kNumCollectives];
  std::atomic<Describe> describe_{nullptr};
  std::atomic<void*> describe_user_{nullptr};
  std::atomic<int> describing_{0};
  Pending pending_;
};

}  // namespace dynamiccl
