// The history of one communicator's call times: from it the guard withdraws choices that are slower
// than NCCL's own, and the brain decides.
//
// The time of a call is the minimum over ranks of its GPU time: the last rank to arrive waits for
// nobody, and what the others spend waiting is skew. A call counts only when all ranks have told
// its time.
//
// What is withdrawn is not in force again. A brain that chooses it is told the times by which it
// was judged, as if it were: to a search its trial has ended, and it goes on to the next.
#pragma once

#include <algorithm>
#include <cstring>
#include <map>
#include <string>
#include <tuple>

#include "agree/stops.h"
#include "brain/message.h"
#include "file.h"
#include "table.h"

namespace dynamiccl {

class Guard {
 public:
  using Table = std::vector<std::uint8_t>;  // a sound table file; empty: not known

  explicit Guard(std::uint32_t num_ranks) : num_ranks_(num_ranks) {}

  std::uint32_t num_ranks() const { return num_ranks_; }
  /// Calls of which all ranks have told the time.
  std::uint64_t num_timed() const { return num_timed_; }
  std::size_t num_withdrawn() const { return withdrawn_.size(); }

  /// What one rank tells of a call; what others tell otherwise is of another one.
  void take(const CallTime& told) {
    if (told.collective >= kNumCollectives || told.duration_ns == 0) return;
    const Call key = {told.sequence, told.collective, told.size_bytes, told.decided, told.flags};
    auto& [ranks, least_ns, most_ns] =
        open_.emplace(key, Open{0, told.duration_ns, 0}).first->second;
    least_ns = std::min(least_ns, told.duration_ns);
    most_ns = std::max(most_ns, told.duration_ns);
    if (++ranks == num_ranks_) {
      finish(told, least_ns, most_ns);
      open_.erase(key);
    }
    if (open_.size() > kMostOpen) open_.erase(open_.begin());
  }

  /// All ranks have agreed on this table: times of other choices are not held against its own.
  void begin(const Table& table) {
    for (auto& [task, history] : tasks_) {
      if (choice_of(table_, task) != choice_of(table, task)) history.ours.clear();
    }
    table_ = table;
  }

  /// Withdraws choices in force whose median time exceeds that of NCCL's own by more than the noise
  /// of their collective, a share. Says which; empty: none.
  std::string withdraw_slow(const std::vector<double>& noise) {
    std::size_t count = 0;
    char first[100] = "";
    for (const auto& [task, history] : tasks_) {
      if (history.ours.size() < kNeeded || history.own.size() < kNeeded) continue;
      const double our_us = median(history.ours), own_us = median(history.own);
      const auto [collective, bin] = task;
      if (our_us <= own_us * (1.0 + noise[static_cast<std::size_t>(collective)])) continue;
      const Calls trial(history.ours.end() - kWindow, history.ours.end());
      if (!withdrawn_.emplace(std::pair(task, choice_of(table_, task)), trial).second) continue;
      if (++count > 1) continue;
      std::snprintf(first, sizeof first,
                    "collective %d around bin %d took %.1f us, NCCL's own %.1f", collective, bin,
                    our_us, own_us);
    }
    return count > 0 ? std::to_string(count) + " choices withdrawn: " + first + " us" : "";
  }

  /// The table without what was withdrawn.
  Table allowed(Table table) const {
    for (const auto& [choice, trial] : withdrawn_) {
      const auto& [task, entry] = choice;
      if (choice_of(table, task) != entry) continue;
      std::memcpy(&table[place_of(table, task)], &kOwnChoice, sizeof kOwnChoice);
    }
    const std::size_t body = table.size() - kChecksumBytes;
    const std::uint64_t checksum = fnv1a(table.data(), body);
    std::memcpy(table.data() + body, &checksum, sizeof checksum);
    return table;
  }

  /// The latest calls of all tasks, for the brain; of a withdrawn choice the ones that it was
  /// judged by.
  std::vector<TimedTask> tasks() const {
    std::vector<TimedTask> tasks;
    for (const auto& [task, history] : tasks_) {
      const auto found = withdrawn_.find({task, choice_of(table_, task)});
      const bool is_withdrawn = found != withdrawn_.end();
      tasks.push_back({task.first, task.second, is_withdrawn ? -1 : history.num_timed,
                       is_withdrawn ? found->second : history.latest});
    }
    return tasks;
  }

 private:
  static constexpr std::size_t kKept = 32;  // times of a task, of each kind: old ones are forgotten
  static constexpr std::size_t kNeeded = 8;  // before they are judged
  static_assert(kNeeded >= kWindow, "a trial fills the brain's window");
  /// Calls that some ranks have told and others not yet; the oldest are given up.
  static constexpr std::size_t kMostOpen = 4'096;

  /// The bytes of an entry that leaves it to NCCL: algorithm and protocol kAuto, all else 0.
  static constexpr std::uint64_t kOwnChoice = 0xffff;

  using Task = std::pair<int, int>;  // collective, size bin
  using Calls = std::vector<TimedCall>;
  /// Sequence number, collective, size, whether it was ours, flags.
  using Call = std::tuple<std::uint64_t, int, std::uint64_t, int, int>;
  struct Open {
    std::uint32_t ranks;
    std::uint64_t least_ns, most_ns;
  };
  struct History {
    std::int64_t num_timed = 0;
    Calls latest, ours, own;
  };

  static void keep(const TimedCall& call, std::size_t most, Calls* calls) {
    if (calls->size() == most) calls->erase(calls->begin());
    calls->push_back(call);
  }

  static double median(const Calls& calls) {
    std::vector<double> times;
    for (const TimedCall& call : calls) times.push_back(call.time_us);
    const auto middle = times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2);
    std::nth_element(times.begin(), middle, times.end());
    return *middle;
  }

  /// Where in a table file a task's entry is; 0: nowhere.
  static std::size_t place_of(const Table& table, const Task& task) {
    TableHeader header = {};
    if (!table.empty()) std::memcpy(&header, table.data(), sizeof header);
    const int column = task.second - header.first_bin;
    if (column < 0 || column >= header.num_bins) return 0;
    const auto entry = static_cast<std::size_t>(task.first * header.num_bins + column);
    return kHeaderBytes + kEntryBytes * entry;
  }

  static std::uint64_t choice_of(const Table& table, const Task& task) {
    std::uint64_t choice = kOwnChoice;
    const std::size_t place = place_of(table, task);
    if (place != 0) std::memcpy(&choice, &table[place], sizeof choice);
    return choice;
  }

  void finish(const CallTime& told, std::uint64_t least_ns, std::uint64_t most_ns) {
    const Task task = {told.collective, size_bin(told.size_bytes)};
    if (task.second < 0) return;
    const TimedCall call = {told.size_bytes,
                            static_cast<double>(least_ns) / 1000.0,
                            static_cast<double>(most_ns - least_ns) / 1000.0,
                            static_cast<std::int8_t>(told.algorithm),  // 255: not known
                            static_cast<std::int8_t>(told.protocol),
                            told.num_channels};
    ++num_timed_;
    History& history = tasks_[task];
    ++history.num_timed;
    keep(call, kWindow, &history.latest);
    if (told.decided == 0) return keep(call, kKept, &history.own);
    // One that was launched before the latest agreement may be told after it.
    Entry entry;
    const std::uint64_t choice = choice_of(table_, task);
    std::memcpy(&entry, &choice, sizeof entry);
    const bool is_its = (entry.algorithm == kAuto || entry.algorithm == call.algorithm) &&
                        (entry.protocol == kAuto || entry.protocol == call.protocol);
    if (entry.act != 0 && is_its) keep(call, kKept, &history.ours);
  }

  std::uint32_t num_ranks_;
  std::uint64_t num_timed_ = 0;
  std::map<Call, Open> open_;
  std::map<Task, History> tasks_;
  Table table_;  // that all ranks have agreed on, and what was withdrawn is in it
  std::map<std::pair<Task, std::uint64_t>, Calls> withdrawn_;  // and what it was judged by
};

}  // namespace dynamiccl
