// What a profiler hears of a group, and on which threads.
#include <algorithm>

#include "nccl/profiler_abi.h"
#include "tests/job/fake_nccl.h"

using namespace dynamiccl;

namespace {

constexpr int kGroupStartApiStop = 23;  // `src/include/plugin/nccl_profiler.h`
constexpr int kGroupEndApiStart = 24;
constexpr int kAnyBelowApi = ncclProfileGroup | ncclProfileColl | ncclProfileKernelCh |
                             ncclProfileGroupApi | ncclProfileCollApi | ncclProfileKernelLaunch;
constexpr int kAnyBelowP2pApi = ncclProfileGroup | ncclProfileP2p | ncclProfileKernelCh |
                                ncclProfileGroupApi | ncclProfileP2pApi | ncclProfileKernelLaunch;
constexpr int kAnyBelowColl = ncclProfileColl | ncclProfileKernelCh;
constexpr int kNumWarps = 17;

/// NCCL makes bytes of AllGather and Broadcast before the profiler sees them.
bool counts_bytes(const Task& task) {
  return task.collective == kAllGather || task.collective == kBroadcast;
}

const char* datatype_name(const Task& task) {
  if (counts_bytes(task)) return "ncclInt8";
  if (task.datatype == Datatype::f32) return "ncclFloat32";
  return task.datatype == Datatype::bf16 ? "ncclBfloat16" : "ncclFloat8e4m3";
}

std::size_t count_of(const Task& task, int num_ranks) {
  const bool per_rank = task.collective == kAllGather || task.collective == kReduceScatter;
  const std::size_t bytes =
      per_rank ? task.size_bytes / static_cast<std::size_t>(num_ranks) : task.size_bytes;
  if (counts_bytes(task) || task.datatype == Datatype::fp8) return bytes;
  return bytes / (task.datatype == Datatype::f32 ? 4 : 2);
}

/// From 0 to 1, another one for each call and rank, and the same in each run.
double drawn(std::uint64_t sequence, int rank) {
  std::uint64_t x = sequence * 0x9e3779b97f4a7c15 + static_cast<std::uint64_t>(rank) + 1;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  return static_cast<double>(x >> 44) / (1 << 20);
}

}  // namespace

ApiEvents Communicator::call_api(const std::vector<Task>& tasks, bool captured) const {
  ApiEvents events;
  if (profiler_ == nullptr) return events;
  events.mask = process_.mask();
  if (!process_.release.has_api_events || (events.mask & kAnyBelowApi) == 0) return events;
  events.group = profiler_->start_group_api(profiler_context_, captured);
  profiler_->record(events.group, kGroupStartApiStop);
  for (const Task& task : tasks) {
    events.collectives.push_back(profiler_->start_coll_api(
        profiler_context_, events.group, task.collective, count_of(task, options_.num_ranks),
        datatype_name(task), captured));
    profiler_->stop(events.collectives.back());
  }
  profiler_->record(events.group, kGroupEndApiStart);
  return events;
}

ApiEvents Communicator::call_p2p_api() const {
  ApiEvents events;
  if (profiler_ == nullptr) return events;
  events.mask = process_.mask();
  if (!process_.release.has_api_events || (events.mask & kAnyBelowP2pApi) == 0) return events;
  events.group = profiler_->start_group_api(profiler_context_, false);
  profiler_->record(events.group, kGroupStartApiStop);
  profiler_->stop(profiler_->start_p2p_api(profiler_context_, events.group));
  profiler_->record(events.group, kGroupEndApiStart);
  return events;
}

/// From 2.29 on a Broadcast's task has no event mask (v2.30.7-1 `src/enqueue.cc:369`): nothing but
/// its CollApi is heard of.
bool Communicator::is_heard_of(const Task& task) const {
  return task.collective != kBroadcast || !process_.release.has_allgatherv;
}

bool Communicator::is_any_heard_of(const std::vector<Task>& tasks) const {
  return std::any_of(tasks.begin(), tasks.end(),
                     [this](const Task& task) { return is_heard_of(task); });
}

/// Of a captured plan it comes at the capture (v2.28.9-1 `src/enqueue.cc`, ncclLaunchKernel).
void Communicator::launch_kernel(const ApiEvents& events) const {
  if (profiler_ == nullptr || !process_.release.has_api_events) return;
  if ((events.mask & ncclProfileKernelLaunch) == 0) return;
  void* handle = profiler_->start_kernel_launch(profiler_context_, events.group);
  if (handle != nullptr) profiler_->stop(handle);
}

void Communicator::end_api(ApiEvents* events) const {
  if (profiler_ == nullptr) return;
  profiler_->stop(events->group);
  events->group = nullptr;
}

void Communicator::launch(const std::vector<Aggregate>& aggregates, const ApiEvents& events,
                          bool captured) {
  const bool has_profiler = profiler_ != nullptr && (events.mask & kAnyBelowColl) != 0;
  void* group = nullptr;
  std::vector<void*> started;
  std::size_t index = 0;
  for (const Aggregate& aggregate : aggregates) {
    const Outcome& outcome = aggregate.outcome;
    for (const Task& task : aggregate.tasks) {
      const bool raised = !captured || (events.mask & ncclProfileKernelCh) != 0;
      std::atomic<std::uint64_t>& sequence = sequence_[task.collective];
      const bool is_told = has_profiler && is_heard_of(task);
      if (is_told && group == nullptr) group = profiler_->start_group(profiler_context_);
      if (is_told) {
        const CollectiveEvent event = {options_.rank,       sequence,
                                       task.collective,     count_of(task, options_.num_ranks),
                                       datatype_name(task), outcome.num_channels,
                                       kNumWarps,           outcome.algorithm,
                                       outcome.protocol};
        const bool has_api = index < events.collectives.size();
        void* parent = process_.release.has_api_events
                           ? (has_api ? events.collectives[index] : nullptr)
                           : group;
        started.push_back(profiler_->start_collective(profiler_context_, parent, event));
      }
      if (raised) sequence += 1;
      ++index;
      if (!is_told || (events.mask & ncclProfileKernelCh) == 0) continue;
      const std::vector<float> costs =
          model_.costs(task.collective, task.size_bytes, 1, task.datatype == Datatype::fp8);
      const int cell = outcome.algorithm * kNumProtocols + outcome.protocol;
      const double slow = cell == process_.options.slow_cell ? process_.options.slow_factor : 1;
      const double factor =
          slow * (1 + 0.01 * process_.options.scatter_percent * drawn(sequence, options_.rank));
      const double cost_us = std::max(1.0F, costs[static_cast<std::size_t>(cell)]);
      const std::uint64_t start_ns = now_ns();
      const Kernel kernel = {
          profiler_.get(), profiler_context_,
          started.back(),  outcome.num_channels,
          start_ns,        start_ns + static_cast<std::uint64_t>(1000 * cost_us * factor)};
      process_.proxy.deliver(this, kernel);
    }
  }
  for (void* handle : started) profiler_->stop(handle);
  if (group != nullptr) profiler_->stop(group);
}
