// One Profiler per communicator makes a CallRecord of each collective from what NCCL tells. It
// changes nothing of what NCCL does, and never returns an error.
//
// Environment (read once per communicator, at its creation):
//   DYNAMICCL_DISABLE         1: nothing is recorded.
//   DYNAMICCL_SAMPLE_PERCENT  share of calls whose GPU time is taken, in bursts. Default 1.
// and those of recorder.h.
#pragma once

#include <atomic>
#include <cstdint>

#include "agree/marks.h"
#include "nccl/profiler_abi.h"
#include "profiler/recorder.h"
#include "vocabulary.h"

namespace dynamiccl {

/// Parts per million of a text such as "1", "0.25" or "100"; -1 when it is not from 0 to 100.
int sample_ppm_of(const char* percent) noexcept;

/// Its memory is used again but never freed: a tuner may hold it, for the three functions.
struct Profiler {
  using Describe = void (*)(void* user, CallRecord* record);

  /// What is told about the calls.
  CallMarks* marks() noexcept { return &call_marks; }

  /// Have `describe` complete each record (table, decided, probe), on the thread of the event. With
  /// null the old one is taken back: false when it was still running after 200 ms, and then `user`
  /// must be left alone for good.
  bool set_describe(Describe describe, void* user) noexcept;

  /// Take the times of the calls from now on, or no longer beyond the bursts: for probes. Called on
  /// the communicator's own thread.
  void take_times(bool wanted) noexcept;

  CallMarks call_marks;
  Profiler* next_free = nullptr;
  CallRecord blank = {};  // what is the same in all
  int* mask = nullptr;    // NCCL's, of the whole process
  std::uint32_t sample_ppm = 0;
  std::atomic<bool> takes_times{false};                // of all calls
  std::atomic<std::uint64_t> latest[kNumCollectives];  // sequence numbers; the bursts' owners
  std::atomic<Describe> describe{nullptr};
  std::atomic<void*> user{nullptr};
  std::atomic<int> describing{0};

  // Broadcasts that CollApi alone tells of. The latest is held until its group is complete.
  std::atomic<bool> hides_broadcasts{false}, holds_broadcast{false};
  CallRecord held = {};  // with what follows, under profiler.cpp's mutex
  void* held_group = nullptr;
  int held_root = 0;  // -1: held_group has several
};

}  // namespace dynamiccl
