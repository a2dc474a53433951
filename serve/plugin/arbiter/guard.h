// The history of one communicator's call times: the guard compares our choices with NCCL's own, and
// the brain decides from it.
//
// The time of a call is the minimum over ranks of its GPU time: the last rank to arrive waits for
// nobody, and what the others spend waiting is skew. A call counts only when all ranks have told
// its time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "agree/told.h"
#include "brain/message.h"

namespace dynamiccl {

class Guard {
 public:
  static constexpr std::size_t kKept = 32;   // times of a task, of each kind
  static constexpr std::size_t kNeeded = 8;  // before they are judged

  explicit Guard(std::uint32_t num_ranks) : num_ranks_(num_ranks) {}

  void take(const CallTime& time);

  struct Slow {
    int collective, bin;
    double our_us, own_us;
  };
  /// Tasks whose median time with our choice exceeds that with NCCL's own by more than the noise of
  /// their collective, a share; negative: not known. They stay withdrawn until chosen anew.
  std::vector<Slow> find_slow(const std::vector<double>& noise);

  /// Makes every withdrawn task abstain in a table file's bytes; false when they are no table.
  bool withdraw_from(std::vector<std::uint8_t>* table) const;

  /// Where these tables differ, what was chosen before is not held against what is chosen now.
  void choose_anew(const std::vector<std::uint8_t>& before, const std::vector<std::uint8_t>& now);

  /// Start over with another artifact.
  void forget();

  /// How many calls all ranks have told the time of, and how many tasks are withdrawn.
  std::uint64_t num_timed() const { return num_timed_; }
  std::uint32_t num_ranks() const { return num_ranks_; }
  std::size_t num_withdrawn() const { return withdrawn_.size(); }

  /// The windows of all tasks.
  std::vector<TimedTask> tasks() const;

 private:
  using Task = std::pair<int, int>;  // collective, size bin
  struct History {
    TimedTask window;
    std::vector<double> ours, own;  // the latest kKept, in a ring
    std::size_t num_ours = 0, num_own = 0;
  };
  struct Open {
    CallTime first;
    std::uint64_t least_ns, most_ns;
    std::uint32_t ranks;
    bool differs;
  };

  void finish(const Open& call);

  std::uint32_t num_ranks_;
  std::map<std::pair<std::uint64_t, int>, Open> open_;  // by sequence number and collective
  std::map<Task, History> tasks_;
  std::set<Task> withdrawn_;
  std::uint64_t num_timed_ = 0;
};

}  // namespace dynamiccl
