// Uses medians of recent times: a few slow calls withdraw nothing, and old conditions are
// forgotten.
#include "arbiter/guard.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "file.h"
#include "table.h"

namespace dynamiccl {
namespace {

constexpr double kUnknownNoise = 0.05;  // where the artifact has no noise band
/// Calls that some ranks have told and others not yet; the oldest are given up.
constexpr std::size_t kMostOpen = 4'096;

double median(std::vector<double> times) {
  const auto middle = times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2);
  std::nth_element(times.begin(), middle, times.end());
  return *middle;
}

void keep(double time_us, std::vector<double>* times, std::size_t* count) {
  if (times->size() < Guard::kKept) {
    times->push_back(time_us);
  } else {
    (*times)[*count % Guard::kKept] = time_us;
  }
  ++*count;
}

}  // namespace

void Guard::take(const CallTime& time) {
  if (time.collective >= kNumCollectives || time.duration_ns == 0) return;
  const std::pair<std::uint64_t, int> key = {time.sequence, time.collective};
  Open& call = open_.emplace(key, Open{time, time.duration_ns, 0, 0, false}).first->second;
  ++call.ranks;
  call.least_ns = std::min(call.least_ns, time.duration_ns);
  call.most_ns = std::max(call.most_ns, time.duration_ns);
  call.differs |= time.size_bytes != call.first.size_bytes || time.decided != call.first.decided ||
                  time.flags != call.first.flags;
  if (call.ranks == num_ranks_) {
    if (!call.differs) finish(call);
    open_.erase(key);
  }
  if (open_.size() > kMostOpen) open_.erase(open_.begin());
}

void Guard::finish(const Open& call) {
  const int collective = call.first.collective, bin = size_bin(call.first.size_bytes);
  if (bin < 0) return;
  ++num_timed_;
  History& history = tasks_[{collective, bin}];
  const double time_us = static_cast<double>(call.least_ns) / 1000.0;
  if (call.first.decided != 0) {
    keep(time_us, &history.ours, &history.num_ours);
  } else {
    keep(time_us, &history.own, &history.num_own);
  }
  TimedTask& window = history.window;
  window.collective = collective;
  window.bin = bin;
  window.num_timed = std::max<std::int64_t>(window.num_timed, 0) + 1;  // whoever chose them
  if (window.calls.size() == kWindow) window.calls.erase(window.calls.begin());
  TimedCall latest;
  latest.size_bytes = call.first.size_bytes;
  latest.time_us = time_us;
  latest.skew_us = static_cast<double>(call.most_ns - call.least_ns) / 1000.0;
  latest.algorithm = static_cast<std::int8_t>(call.first.algorithm);
  latest.protocol = static_cast<std::int8_t>(call.first.protocol);
  latest.num_channels = static_cast<std::int8_t>(call.first.num_channels);
  window.calls.push_back(latest);
}

std::vector<Guard::Slow> Guard::find_slow(const std::vector<double>& noise) {
  std::vector<Slow> found;
  for (const auto& [task, history] : tasks_) {
    if (withdrawn_.count(task) != 0) continue;
    if (history.num_ours < kNeeded || history.num_own < kNeeded) continue;
    const double ours = median(history.ours), own = median(history.own);
    const auto collective = static_cast<std::size_t>(task.first);
    const bool is_known = collective < noise.size() && noise[collective] >= 0.0;
    if (ours <= own * (1.0 + (is_known ? noise[collective] : kUnknownNoise))) continue;
    withdrawn_.insert(task);
    found.push_back({task.first, task.second, ours, own});
  }
  return found;
}

bool Guard::withdraw_from(std::vector<std::uint8_t>* table) const {
  const auto decoded = std::make_unique<DecisionTable>();
  if (decode_table(table->data(), table->size(), decoded.get()) != nullptr) return false;
  for (const Task& task : withdrawn_) {
    const int column = task.second - decoded->first_bin;
    if (column < 0 || column >= decoded->num_bins) continue;
    const int entry = task.first * decoded->num_bins + column;
    const std::uint8_t abstain[kEntryBytes] = {0xff, 0xff, 0, 0, 0, 0, 0, 0};
    std::memcpy(table->data() + kHeaderBytes + kEntryBytes * static_cast<std::size_t>(entry),
                abstain, sizeof abstain);
  }
  const std::size_t body = table->size() - kChecksumBytes;
  const std::uint64_t checksum = fnv1a(table->data(), body);
  std::memcpy(table->data() + body, &checksum, sizeof checksum);
  return true;
}

void Guard::choose_anew(const std::vector<std::uint8_t>& before,
                        const std::vector<std::uint8_t>& now) {
  const auto first = std::make_unique<DecisionTable>(), second = std::make_unique<DecisionTable>();
  if (decode_table(before.data(), before.size(), first.get()) != nullptr ||
      decode_table(now.data(), now.size(), second.get()) != nullptr) {
    return;
  }
  for (auto& [task, history] : tasks_) {
    const std::uint64_t size_bytes = history.window.calls[0].size_bytes;
    const Entry* ours = lookup(*first, task.first, size_bytes);
    const Entry* chosen = lookup(*second, task.first, size_bytes);
    const bool both = ours != nullptr && chosen != nullptr;
    if (both ? std::memcmp(ours, chosen, sizeof *ours) == 0 : ours == chosen) continue;
    history.ours.clear();
    history.num_ours = 0;
    withdrawn_.erase(task);
  }
}

void Guard::forget() {
  open_.clear();
  tasks_.clear();
  withdrawn_.clear();
}

std::vector<TimedTask> Guard::tasks() const {
  std::vector<TimedTask> tasks;
  for (const auto& [task, history] : tasks_) tasks.push_back(history.window);
  return tasks;
}

}  // namespace dynamiccl
