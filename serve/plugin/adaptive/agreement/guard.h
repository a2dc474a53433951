// The leader's history of call times: the guard compares our choices with NCCL's own, and the brain
// decides from it.
//
// The time of a call is the minimum over ranks of its GPU time: the last rank to arrive waits for
// nobody, and what the others spend waiting is skew. A call counts only when all ranks have
// reported.
#pragma once

#include <cstddef>
#include <cstdint>

#include "adaptive/agreement/artifact.h"
#include "adaptive/brain/brain_abi.h"
#include "profiler/record.h"

namespace dynamiccl {

/// One rank's time of one call, as it is sent to the leader.
struct Sample {
  std::uint64_t sequence;
  std::uint64_t size_bytes;
  std::uint64_t duration_ns;
  std::uint8_t collective, algorithm, protocol, num_channels, decided, flags;
};
inline constexpr std::size_t kSampleBytes = 30;

void write_sample(const Sample& sample, std::uint8_t* bytes) noexcept;
Sample read_sample(const std::uint8_t* bytes) noexcept;

class Guard {
 public:
  static constexpr int kKept = 32;   // times of a task, of each kind
  static constexpr int kNeeded = 8;  // before they are judged
  static constexpr int kTasks = 1024;

  static Guard* create(std::int32_t num_ranks) noexcept;
  static void destroy(Guard* guard) noexcept;

  void take(const Sample& sample) noexcept;

  /// Finds tasks whose median time with our choice exceeds that with NCCL's own choice by more than
  /// the noise; they stay withdrawn until forget(). Writes the first of them.
  struct Slow {
    int collective;
    int bin;
    double our_us, own_us;
  };
  int find_slow(const Artifact& artifact, Slow* first) noexcept;

  /// Makes every withdrawn task abstain in a table's bytes. False when they are no table.
  bool withdraw_from(std::uint8_t* table, std::size_t bytes) const noexcept;

  int num_withdrawn() const noexcept { return num_withdrawn_; }
  /// Start over with another artifact.
  void forget() noexcept;

  /// Number of calls that all ranks have reported.
  std::uint64_t complete() const noexcept { return complete_; }

  /// Copies the windows of all tasks to `tasks`; returns the number of tasks.
  int copy_tasks(dynamiccl_task* tasks, int capacity) const noexcept;

 private:
  static constexpr std::uint32_t kOpenCalls = 512;

  struct Task {
    dynamiccl_task window;
    float ours[kKept], own[kKept];
    std::uint32_t num_ours, num_own;
    bool withdrawn;
  };
  struct OpenCall {
    Sample first;
    std::uint64_t least_ns, most_ns;
    std::int32_t ranks;  // 0: free
    bool differs;
  };

  explicit Guard(std::int32_t num_ranks) noexcept : num_ranks_(num_ranks) {}
  ~Guard();
  Task* task_of(int collective, int bin) noexcept;
  void finish(const OpenCall& call) noexcept;

  const std::int32_t num_ranks_;
  OpenCall open_[kOpenCalls] = {};
  Task* tasks_[kTasks] = {};
  int num_withdrawn_ = 0;
  std::uint64_t complete_ = 0;
};

}  // namespace dynamiccl
