// One Profiler per communicator makes a CallRecord of each collective from what NCCL tells. It
// changes nothing of what NCCL does, and never returns an error.
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

/// Its memory is used again but never freed: a tuner may hold it, for marks and both functions.
struct Profiler {
  using Describe = void (*)(void* user, CallRecord* record);

  /// Have `describe` complete each record (table, decided, probe), on the thread of the event. With
  /// null the old one is taken back: false when it was still running after 200 ms, and then `user`
  /// must be left alone for good.
  bool set_describe(Describe describe, void* user) noexcept;

  /// Take the times of the calls from now on, or no longer beyond the bursts: for probes. Called on
  /// the communicator's own thread.
  void take_times(bool wanted) noexcept;

  CallMarks call_marks;  // what is told about the calls
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

// What NCCL told the profiler about a communicator, for the tuner, which is created next on the
// same thread and gets neither rank nor, before 2.28, id. Both inits of a communicator run on one
// thread, the profiler's first (`src/init.cc`, ncclCommInitRankFunc, 2.28.9 to 2.30.7), so ranks of
// one communicator that share a process are not mixed up.

struct CreatedCommunicator {
  std::uint64_t comm_id;  // 0: none
  std::int32_t rank;
  std::int32_t num_ranks;
  std::int32_t num_nodes;
  Profiler* profiler;  // null: it records nothing
};

/// Of this thread's latest profiler init, until a tuner has taken it.
inline thread_local CreatedCommunicator t_created = {};

/// Once, and only if it is of that communicator: else a tuner was never created for it.
inline bool take_created(std::uint64_t comm_id, CreatedCommunicator* communicator) noexcept {
  *communicator = t_created;
  t_created = {};
  return comm_id != 0 && communicator->comm_id == comm_id;
}

}  // namespace dynamiccl
