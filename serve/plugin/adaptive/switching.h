// One communicator in mode adaptive: looks up in the table in force, and votes on the next one from
// inside those of its calls that are stops (agree/stops.h). No thread, no file, and no connection
// but during a stop.
//
//   DYNAMICCL_STOP_PERCENT  share of the process's time that calls may wait at stops. Default 0.1.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "agree/caller.h"
#include "agree/stops.h"
#include "agree/told.h"
#include "choice.h"
#include "identity/communicator.h"
#include "profiler/profiler.h"
#include "profiler/recorder.h"
#include "table.h"

namespace dynamiccl {

class Switching {
 public:
  /// What a communicator has been given in `init`.
  struct Begin {
    Communicator communicator;
    int nccl_version;
    std::int32_t rank;
    Profiler* profiler;  // of this communicator
    std::uint64_t job;
    Arbiter arbiter;
    const DecisionTable* table;  // valid until the process ends
    Reply agreed;
  };

  /// Null when memory is short. A second one of one id in the process ends voting for both.
  static Switching* create(const Begin& begin) noexcept;

  /// Ids may repeat from now on: no communicator of this process votes any more.
  static void end_voting_of_all() noexcept;

  /// Give it back. ncclCommAbort calls this from another thread while a call may be inside `answer`
  /// (`src/init.cc`): the call is woken, and this returns after it has left.
  static void retire(Switching* switching) noexcept;

  /// Set the chosen cell to 0.0 and, with it, the channels; or touch nothing. An error only where
  /// this rank cannot know which table the others use.
  ncclResult_t answer(int collective, std::size_t size_bytes, CostTable costs,
                      int* num_channels) noexcept;

  explicit Switching(const Begin& begin) noexcept;
  ~Switching();
  Switching(const Switching&) = delete;
  Switching& operator=(const Switching&) = delete;

 private:
  /// Of the latest calls since the last stop, as many as the body of a vote holds.
  static constexpr std::size_t kMostTimes = (kMostBodyBytes - sizeof(Told)) / sizeof(CallTime);

  void stop() noexcept;
  void stop_failed() noexcept;
  void end_voting(const char* why) noexcept;
  void agreed(const Reply& proposal) noexcept;
  void be_described() noexcept;
  Verdict agree(Vote vote, Reply* proposal) noexcept;
  bool accept(const Exchange& exchange) noexcept;
  void describe(CallRecord* record) const noexcept;
  static void take_time(void*, const CallRecord& record) noexcept;
  void say(const char* what) const noexcept;

  const Begin begin_;
  const int process_;
  const std::uint64_t stop_ppm_;
  Stops stops_;
  std::atomic<int> inside_{0};
  std::atomic<bool> leaves_{false};
  bool has_failed_ = false;
  DecisionTable* received_ = nullptr;  // the latest one that came at a stop
  DecisionTable* fresh_ = nullptr;     // that has come, and is not agreed on
  std::uint64_t said_ = 0;             // a digest of the leader's latest words
  std::atomic<std::uint32_t> table_number_{1};
  Switching* next_ = nullptr;  // under the list's mutex, as are
  CallTime times_[kMostTimes];
  std::size_t num_times_ = 0;  // since the last stop
};

}  // namespace dynamiccl
