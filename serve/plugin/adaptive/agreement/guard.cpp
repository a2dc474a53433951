// Uses medians of recent times: a few slow calls withdraw nothing, and old conditions are
// forgotten.
#include "adaptive/agreement/guard.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include "file.h"
#include "table.h"

namespace dynamiccl {
namespace {

constexpr double kUnknownNoise = 0.05;  // where the artifact has no noise band

float median(const float* times, std::uint32_t count) noexcept {
  float sorted[Guard::kKept];
  const auto size = std::min<std::uint32_t>(count, Guard::kKept);
  std::copy(times, times + size, sorted);
  std::nth_element(sorted, sorted + size / 2, sorted + size);
  return sorted[size / 2];
}

void write_unsigned(std::uint8_t* bytes, std::uint64_t value, std::size_t size) noexcept {
  for (std::size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::uint8_t>(value >> (8 * i));
}

}  // namespace

void write_sample(const Sample& sample, std::uint8_t* bytes) noexcept {
  write_unsigned(bytes, sample.sequence, 8);
  write_unsigned(bytes + 8, sample.size_bytes, 8);
  write_unsigned(bytes + 16, sample.duration_ns, 8);
  const std::uint8_t rest[] = {sample.collective,   sample.algorithm, sample.protocol,
                               sample.num_channels, sample.decided,   sample.flags};
  std::memcpy(bytes + 24, rest, sizeof rest);
}

Sample read_sample(const std::uint8_t* bytes) noexcept {
  return {read_unsigned(bytes, 8),
          read_unsigned(bytes + 8, 8),
          read_unsigned(bytes + 16, 8),
          bytes[24],
          bytes[25],
          bytes[26],
          bytes[27],
          bytes[28],
          bytes[29]};
}

Guard* Guard::create(std::int32_t num_ranks) noexcept {
  void* memory = std::malloc(sizeof(Guard));
  return memory != nullptr ? new (memory) Guard(num_ranks) : nullptr;
}

void Guard::destroy(Guard* guard) noexcept {
  if (guard == nullptr) return;
  guard->~Guard();
  std::free(guard);
}

Guard::~Guard() {
  for (Task* task : tasks_) std::free(task);
}

Guard::Task* Guard::task_of(int collective, int bin) noexcept {
  const int start = (bin * kNumCollectives + collective) % kTasks;
  for (int i = 0; i < kTasks; ++i) {
    Task*& task = tasks_[(start + i) % kTasks];
    if (task == nullptr) {
      task = static_cast<Task*>(std::calloc(1, sizeof(Task)));
      if (task == nullptr) return nullptr;
      task->window.collective = collective;
      task->window.bin = bin;
    }
    if (task->window.collective == collective && task->window.bin == bin) return task;
  }
  return nullptr;
}

void Guard::take(const Sample& sample) noexcept {
  if (sample.collective >= kNumCollectives || sample.duration_ns == 0) return;
  const std::uint64_t key = sample.sequence * kNumCollectives + sample.collective;
  OpenCall& call = open_[key % kOpenCalls];
  const bool same = call.ranks > 0 && call.first.sequence == sample.sequence &&
                    call.first.collective == sample.collective;
  if (!same) {
    call = {sample, sample.duration_ns, sample.duration_ns, 0, false};
  }
  ++call.ranks;
  call.least_ns = std::min(call.least_ns, sample.duration_ns);
  call.most_ns = std::max(call.most_ns, sample.duration_ns);
  call.differs |= sample.size_bytes != call.first.size_bytes ||
                  sample.decided != call.first.decided || sample.flags != call.first.flags;
  if (call.ranks < num_ranks_) return;
  if (!call.differs) finish(call);
  call.ranks = 0;
}

void Guard::finish(const OpenCall& call) noexcept {
  const int bin = size_bin(call.first.size_bytes);
  Task* task = bin >= 0 ? task_of(call.first.collective, bin) : nullptr;
  if (task == nullptr) return;
  ++complete_;
  const double time_us = static_cast<double>(call.least_ns) / 1000.0;
  if (call.first.decided != 0) {
    task->ours[task->num_ours++ % kKept] = static_cast<float>(time_us);
  } else {
    task->own[task->num_own++ % kKept] = static_cast<float>(time_us);
  }
  dynamiccl_task& window = task->window;
  if (window.num_calls == DYNAMICCL_WINDOW) {
    std::memmove(window.calls, window.calls + 1, sizeof window.calls - sizeof window.calls[0]);
    --window.num_calls;
  }
  ++window.num_timed;
  dynamiccl_call& latest = window.calls[window.num_calls++];
  latest.size_bytes = call.first.size_bytes;
  latest.time_us = time_us;
  latest.skew_us = static_cast<double>(call.most_ns - call.least_ns) / 1000.0;
  latest.interference = -1.0;
  latest.algorithm = static_cast<std::int8_t>(call.first.algorithm);
  latest.protocol = static_cast<std::int8_t>(call.first.protocol);
  latest.num_channels = static_cast<std::int8_t>(call.first.num_channels);
}

int Guard::find_slow(const Artifact& artifact, Slow* first) noexcept {
  int found = 0;
  for (Task* task : tasks_) {
    if (task == nullptr || task->withdrawn) continue;
    if (task->num_ours < kNeeded || task->num_own < kNeeded) continue;
    const double ours = median(task->ours, task->num_ours);
    const double own = median(task->own, task->num_own);
    const std::int64_t ppm = artifact.noise_ppm(task->window.collective);
    const double noise = ppm >= 0 ? static_cast<double>(ppm) / 1e6 : kUnknownNoise;
    if (ours <= own * (1.0 + noise)) continue;
    task->withdrawn = true;
    ++num_withdrawn_;
    if (found++ == 0) *first = {task->window.collective, task->window.bin, ours, own};
  }
  return found;
}

bool Guard::withdraw_from(std::uint8_t* table, std::size_t bytes) const noexcept {
  if (num_withdrawn_ == 0) return true;
  auto* decoded = static_cast<DecisionTable*>(std::malloc(sizeof(DecisionTable)));
  const bool sound = decoded != nullptr && decode_table(table, bytes, decoded) == nullptr;
  if (sound) {
    for (const Task* task : tasks_) {
      if (task == nullptr || !task->withdrawn) continue;
      const int column = task->window.bin - decoded->first_bin;
      if (column < 0 || column >= decoded->num_bins) continue;
      const int entry = task->window.collective * decoded->num_bins + column;
      std::uint8_t* where = table + kHeaderBytes + kEntryBytes * static_cast<std::size_t>(entry);
      const std::uint8_t abstain[kEntryBytes] = {0xff, 0xff, 0, 0, 0, 0, 0, 0};
      std::memcpy(where, abstain, sizeof abstain);
    }
    const std::size_t body = bytes - kChecksumBytes;
    write_unsigned(table + body, fnv1a(table, body), kChecksumBytes);
  }
  std::free(decoded);
  return sound;
}

void Guard::forget() noexcept {
  for (Task*& task : tasks_) {
    std::free(task);
    task = nullptr;
  }
  num_withdrawn_ = 0;
}

int Guard::copy_tasks(dynamiccl_task* tasks, int capacity) const noexcept {
  int count = 0;
  for (const Task* task : tasks_) {
    if (task == nullptr || task->window.num_calls == 0 || count == capacity) continue;
    tasks[count++] = task->window;
  }
  return count;
}

}  // namespace dynamiccl
