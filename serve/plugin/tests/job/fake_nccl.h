// NCCL as one process of a job has it, without GPUs: creates communicators, asks the tuner, feeds
// the profiler as the release does, and computes what would run.
//
// Order of calls and threads: `src/init.cc`, `src/enqueue.cc`, `src/group.cc`.
#pragma once

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <functional>
#include <tuple>

#include "tests/job/plan.h"
#include "tests/job/plugins.h"

using namespace dynamiccl;

/// The calling thread was inside a communicator that another thread aborted.
struct Aborted : std::runtime_error {
  Aborted() : std::runtime_error("aborted") {}
};

/// NCCL's spelling in events (`src/collectives.cc`).
constexpr const char* kCollectiveNames[] = {"Broadcast", "Reduce", "AllGather", "ReduceScatter",
                                            "AllReduce"};
constexpr const char* kAlgorithmNames[] = {
    "TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT"};
constexpr const char* kProtocolNames[] = {"LL", "LL128", "SIMPLE"};

/// A cost model of the form of NCCL's, with round figures: which cells there are on up to three
/// nodes, that the cheapest one moves with the size, and what is decided after it (channels).
struct CostModel {
  int num_ranks, num_nodes;

  /// Microseconds, flat [kNumAlgorithms][kNumProtocols], -1.0 where not available.
  std::vector<float> costs(int collective, std::size_t size_bytes) const {
    static constexpr double kLines[kNumAlgorithms][kNumProtocols][2] = {
        // us, GB/s
        {{7, 20}, {14, 70}, {20, 95}},   // Tree
        {{9, 25}, {16, 90}, {28, 130}},  // Ring
        {},                              // CollNetDirect
        {},                              // CollNetChain
        {{}, {}, {25, 170}},             // NVLS
        {{}, {}, {31, 150}},             // NVLSTree
        {{}, {}, {18, 60}},              // PAT
    };
    const bool is_here[] = {
        true, true, false, false, num_nodes == 1, num_nodes > 1, num_nodes == num_ranks};
    std::vector<float> costs;
    for (int cell = 0; cell < kNumAlgorithms * kNumProtocols; ++cell) {
      const int a = cell / kNumProtocols, p = cell % kNumProtocols;
      const double hops = a == kRing ? num_ranks - 1 : 1 + std::log2(num_ranks);
      const double us = kLines[a][p][0] + 0.7 * hops * num_nodes +
                        static_cast<double>(size_bytes) / (1000 * kLines[a][p][1]);
      const bool is_valid = is_here[a] && (kValid[collective][a] >> p & 1) != 0;
      costs.push_back(is_valid ? static_cast<float>(us) : kCostIgnore);
    }
    return costs;
  }

  /// NCCL's argmin, ties to the lower cell; -1 when no cell is available.
  static int cheapest(const std::vector<float>& costs) {
    int best = -1;
    float least = 0;
    for (std::size_t cell = 0; cell < costs.size(); ++cell) {
      if (!(costs[cell] >= 0) || (best >= 0 && costs[cell] >= least)) continue;
      best = static_cast<int>(cell);
      least = costs[cell];
    }
    return best;
  }

  int most_channels() const { return num_nodes > 1 ? 16 : 24; }

  /// Channels really used when `asked` may be (0: as many as NCCL finds right).
  int used_channels(const Outcome& outcome, int asked) const {
    const bool is_nvls = outcome.algorithm == kNVLS || outcome.algorithm == kNVLSTree;
    const int most = is_nvls ? 16 : most_channels();
    const std::uint64_t per_channel = outcome.protocol == kLL ? 1 << 12 : 1 << 15;
    if (asked == 0) asked = is_nvls ? most : static_cast<int>(outcome.size_bytes / per_channel);
    return std::max(1, std::min(asked, most));
  }
};

/// NCCL's proxy thread, one for all communicators of a process, as far as a profiler sees it:
/// KernelCh events, and the host tasks of replayed CUDA graphs.
class Proxy {
 public:
  Proxy() : thread_(start_thread([this] { loop(); })) {}

  /// `owner` is any address that stands for the communicator.
  void add(const void* owner, std::uint64_t due_ns, std::function<void()> task) {
    const std::lock_guard<std::mutex> lock(mutex_);
    queue_.emplace(due_ns, Item{owner, std::move(task)});
    changed_.notify_all();
  }

  /// Waits until nothing of `owner` is left.
  void finish(const void* owner) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] {
      return busy_with_ != owner &&
             std::none_of(queue_.begin(), queue_.end(),
                          [&](const auto& item) { return item.second.owner == owner; });
    });
  }

 private:
  struct Item {
    const void* owner;
    std::function<void()> task;
  };

  [[noreturn]] void loop() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      const std::uint64_t now = now_ns();
      if (queue_.empty()) {
        changed_.wait(lock);
      } else if (queue_.begin()->first > now) {
        changed_.wait_for(lock, std::chrono::nanoseconds(queue_.begin()->first - now));
      } else {
        const Item item = std::move(queue_.extract(queue_.begin()).mapped());
        busy_with_ = item.owner;
        lock.unlock();
        item.task();
        lock.lock();
        busy_with_ = nullptr;
        changed_.notify_all();
      }
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::multimap<std::uint64_t, Item> queue_;  // by the time when it is due
  const void* busy_with_ = nullptr;
  std::thread thread_;
};

/// State that NCCL has once a process.
struct Process {
  const Options& options;
  Tuner tuner{options.release};
  Profiler profiler{options.release};
  int event_mask = 0;  // the plugin may write it at any time
  Proxy proxy{};
};

/// Collectives of a group that NCCL decides on together.
struct Aggregate {
  std::vector<Task> tasks;
  Outcome outcome;
};

/// A group that was called: what it runs at each launch, and its events.
struct Group {
  std::vector<Aggregate> aggregates;
  bool is_captured = false;
  int mask = 0;              // the event mask when it was called
  void* event = nullptr;     // GroupApi, open until it has been launched or captured
  std::vector<void*> calls;  // CollApi, one for each task, in the order of the calls

  std::vector<Outcome> outcomes() const {
    std::vector<Outcome> all;
    for (const Aggregate& aggregate : aggregates) all.push_back(aggregate.outcome);
    return all;
  }
};

class Communicator {
 public:
  /// Throws std::runtime_error when a plugin refuses.
  Communicator(Process& process, std::uint64_t id, int rank, int num_ranks, int num_nodes)
      : process_(process), rank_(rank), model_{num_ranks, num_nodes} {
    const std::uint64_t begin_ns = now_ns();
    has_profiler_ = process.profiler.open();
    if (has_profiler_ &&
        process.profiler.init(&profiler_context_, id, &process.event_mask, num_nodes, num_ranks,
                              rank) != ncclSuccess) {  // NCCL goes on without it
      has_profiler_ = false;
      process.profiler.close();
    }
    has_tuner_ = process.tuner.open();
    if (has_tuner_) {
      check(process.tuner.init(&tuner_context_, id, num_ranks, num_nodes), "the tuner's init");
    }
    raise_to(&g_state->created_longest_ns, now_ns() - begin_ns);
  }

  /// One group of collectives, called, planned and launched. Throws std::runtime_error or Aborted.
  std::vector<Outcome> run(const std::vector<Task>& tasks) {
    const auto inside = enter();
    const Group group = enqueue(tasks, false);
    launch(group);
    process_.profiler.stop(group.event);
    return group.outcomes();
  }

  /// Broadcasts of several roots in one group, which NCCL 2.29 and later run as one AllGatherV
  /// (v2.29.7-1 `src/enqueue.cc:366,1580`, `src/scheduler/allgatherv_sched.cc`).
  std::vector<Outcome> broadcast_many(const std::vector<Task>& broadcasts) {
    if (!has_allgatherv()) return run(broadcasts);
    const auto inside = enter();
    const Group group = call(broadcasts, false);
    Aggregate one = aggregates_of({{kAllGather, broadcasts.back().size_bytes, false}}).front();
    // Taken as it is, and the index of a channel.
    if (ask(&one) > model_.most_channels()) {
      complain("asked AllGatherV for more channels than there are");
    }
    process_.profiler.stop(group.event);  // the profiler hears no more of it
    return {one.outcome};
  }

  /// ncclSend and ncclRecv in a group of their own: a kernel runs, and no tuner is asked.
  void send_receive() {
    const auto inside = enter();
    const Group group = enqueue({}, false);
    if ((group.mask & ncclProfileP2p) != 0) {
      void* event = start(ncclProfileGroup, nullptr);
      process_.profiler.stop(start(ncclProfileP2p, event));
      process_.profiler.stop(event);
    }
    process_.profiler.stop(group.event);
  }

  /// ncclGroupSimulateEnd: the tuner is asked and nothing runs.
  void simulate(const std::vector<Task>& tasks) {
    const auto inside = enter();
    const Group group = call(tasks, false);
    for (Aggregate& aggregate : aggregates_of(tasks)) ask(&aggregate);
    process_.profiler.stop(group.event);
  }

  /// The tuner is asked about symmetric kernels, with numPipeOps 0, three times for each task
  /// (2.31.0a7 `src/scheduler/symmetric_sched.cc:158`, `src/tuning/tuning.cc`).
  void ask_about_symmetric(const std::vector<Task>& tasks) {
    const auto inside = enter();
    for (std::size_t i = 0; i < 3 * tasks.size(); ++i) {
      const auto& [collective, size_bytes, is_bf16] = tasks[i / 3];
      std::vector<float> costs = model_.costs(collective, size_bytes);
      ask_once(collective, size_bytes, 0, &costs);
    }
  }

  Group capture(const std::vector<Task>& tasks) {
    const auto inside = enter();
    const Group group = enqueue(tasks, true);
    if (!has_host_nodes(group)) launch(group);
    process_.profiler.stop(group.event);
    return group;
  }

  /// Without a word to the tuner; the profiler hears of it only where the graph has host nodes.
  std::vector<Outcome> replay(const Group& group) {
    const auto inside = enter();
    if (has_host_nodes(group)) {
      process_.proxy.add(this, now_ns(), [this, group] { launch(group); });
    }
    std::vector<Outcome> outcomes = group.outcomes();
    for (Outcome& outcome : outcomes) outcome.replayed = 1;
    return outcomes;
  }

  /// ncclCommDestroy.
  void destroy() {
    process_.proxy.finish(this);
    if (has_tuner_) {
      check(process_.tuner->finalize(tuner_context_), "the tuner's finalize");
      process_.tuner.close();
    }
    if (!has_profiler_) return;
    if (profiler_context_ != nullptr) process_.profiler.finalize(profiler_context_);
    process_.profiler.close();
  }

  /// ncclCommAbort, from any other thread, also while one is inside a call. Once that has been in
  /// the plugin for so long it waits there; NCCL itself does not survive an abort before that.
  void abort() {
    constexpr std::uint64_t kSurelyInsideNs = 200'000'000;
    aborting_ = true;
    std::unique_lock<std::mutex> lock(inside_, std::defer_lock);
    while (!lock.try_lock()) {
      const std::uint64_t since_ns = asking_since_ns_;
      if (since_ns != 0 && now_ns() - since_ns > kSurelyInsideNs) break;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    destroy();
  }

 private:
  /// The calling thread's stay inside the communicator, which an abort respects.
  std::unique_lock<std::mutex> enter() {
    std::unique_lock<std::mutex> lock(inside_);
    if (aborting_) throw Aborted();
    return lock;
  }

  static void check(ncclResult_t result, const std::string& where) {
    if (result == ncclSuccess) return;
    throw std::runtime_error(where + " returned " + std::to_string(result));
  }

  bool has_api_events() const { return process_.options.release >= 22800; }
  bool has_allgatherv() const { return process_.options.release >= 22900; }

  /// Proxy operations need the host at every replay, and then the events come there.
  bool has_host_nodes(const Group& group) const {
    return model_.num_nodes > 1 || (group.mask & ncclProfileKernelCh) != 0;
  }

  /// By kind; NCCL does not join sizes that differ much.
  static std::vector<Aggregate> aggregates_of(const std::vector<Task>& tasks) {
    std::map<std::pair<int, bool>, Aggregate> of_kind;
    for (const Task& task : tasks) {
      Aggregate& aggregate = of_kind[{task.collective, task.is_bf16}];
      aggregate.tasks.push_back(task);
      aggregate.outcome.collective = task.collective;
      aggregate.outcome.size_bytes += task.size_bytes;
    }
    std::vector<Aggregate> aggregates;
    for (auto& [kind, aggregate] : of_kind) aggregates.push_back(std::move(aggregate));
    return aggregates;
  }

  Group enqueue(const std::vector<Task>& tasks, bool captured) {
    Group group = call(tasks, captured);
    group.aggregates = aggregates_of(tasks);
    for (Aggregate& aggregate : group.aggregates) ask(&aggregate);
    // Of a captured plan it comes at the capture (v2.28.9-1 `src/enqueue.cc`, ncclLaunchKernel).
    const bool is_launched =
        tasks.empty() || std::any_of(tasks.begin(), tasks.end(),
                                     [&](const Task& task) { return is_heard_of(task); });
    if (has_api_events() && (group.mask & ncclProfileKernelLaunch) != 0 && is_launched) {
      process_.profiler.stop(start(ncclProfileKernelLaunch, group.event));
    }
    return group;
  }

  /// Returns how many channels the tuner asked for (0: NCCL's own), and leaves its costs.
  int ask_once(int collective, std::size_t size_bytes, int num_pipe_ops,
               std::vector<float>* costs) {
    if (!has_tuner_) return 0;
    const std::vector<float> before = *costs;
    int num_channels = 0;
    // Whether the buffers are registered is each rank's own affair.
    const auto reg_buff = static_cast<int>(mixed(rank_, ++num_asked_) % 2);
    const std::uint64_t begin_ns = now_ns();
    asking_since_ns_ = begin_ns;
    const ncclResult_t result =
        process_.tuner->getCollInfo(tuner_context_, collective, size_bytes, num_pipe_ops,
                                    reinterpret_cast<float**>(costs->data()), kNumAlgorithms,
                                    kNumProtocols, reg_buff, &num_channels);
    asking_since_ns_ = 0;
    ++g_state->asked;
    raise_to(&g_state->asked_longest_ns, now_ns() - begin_ns);
    if (aborting_) throw Aborted();
    check(result, "getCollInfo");
    const auto complain_if = [&](bool is_wrong, const std::string& what) {
      if (is_wrong) complain(what + " for " + kCollectiveNames[collective]);
    };
    for (std::size_t cell = 0; cell < before.size(); ++cell) {
      complain_if(before[cell] == kCostIgnore && (*costs)[cell] != kCostIgnore,
                  "wrote into the unavailable cell " + std::to_string(cell));
    }
    complain_if(num_pipe_ops == 0 && (*costs != before || num_channels != 0),
                "answered about symmetric kernels");
    complain_if(num_channels < 0 || num_channels > kMaxChannels,
                "asked for " + std::to_string(num_channels) + " channels");
    return num_channels;
  }

  /// Completes the outcome; returns how many channels the tuner asked for.
  int ask(Aggregate* aggregate) {
    Outcome& outcome = aggregate->outcome;
    for (const Task& task : aggregate->tasks) {
      outcome.question = mixed(mixed(outcome.question, task.collective), task.size_bytes);
    }
    const std::vector<float> before = model_.costs(outcome.collective, outcome.size_bytes);
    std::vector<float> costs = before;
    // numPipeOps: there are fewer collectives in a group than channels.
    const int asked = ask_once(outcome.collective, outcome.size_bytes, 1, &costs);
    const int cell = CostModel::cheapest(costs);
    if (cell < 0) throw std::runtime_error("no algorithm is left");
    outcome.algorithm = cell / kNumProtocols;
    outcome.protocol = cell % kNumProtocols;
    outcome.acted = costs != before || asked != 0;
    outcome.num_channels = model_.used_channels(outcome, asked);
    return asked;
  }

  // What a profiler hears of a group.

  template <typename... More>
  void* start(int type, void* parent, const More&... more) const {
    return process_.profiler.start(profiler_context_, static_cast<std::uint64_t>(type), parent,
                                   rank_, more...);
  }

  /// The calls of a group; without tasks, a Send.
  Group call(const std::vector<Task>& tasks, bool captured) const {
    constexpr int kGroupStartApiStop = 23, kGroupEndApiStart = 24;  // `nccl_profiler.h`
    Group group;
    group.is_captured = captured;
    if (!has_profiler_) return group;
    group.mask = __atomic_load_n(&process_.event_mask, __ATOMIC_RELAXED);
    const int of_others =
        tasks.empty() ? ncclProfileColl | ncclProfileCollApi : ncclProfileP2p | ncclProfileP2pApi;
    if (!has_api_events() || (group.mask & ~of_others) == 0) return group;
    const Profiler& profiler = process_.profiler;
    using Descriptor = ncclProfilerEventDescr_v5_t;
    group.event = start(ncclProfileGroupApi, nullptr);
    profiler.record(group.event, kGroupStartApiStop, nullptr);
    for (const Task& task : tasks) {
      group.calls.push_back(start(ncclProfileCollApi, group.event, [&](Descriptor* descriptor) {
        describe(task, &descriptor->collApi);
        descriptor->collApi.graphCaptured = captured;
      }));
      profiler.stop(group.calls.back());
    }
    if (tasks.empty()) profiler.stop(start(ncclProfileP2pApi, group.event));
    profiler.record(group.event, kGroupEndApiStart, nullptr);
    return group;
  }

  /// NCCL makes bytes of AllGather and Broadcast before the profiler sees them.
  template <typename Event>
  void describe(const Task& task, Event* event) const {
    const bool in_bytes = task.collective == kAllGather || task.collective == kBroadcast;
    const bool per_rank = task.collective == kAllGather || task.collective == kReduceScatter;
    const int divisor = (per_rank ? model_.num_ranks : 1) * (in_bytes ? 1 : task.is_bf16 ? 2 : 4);
    event->func = kCollectiveNames[task.collective];
    event->count = task.size_bytes / static_cast<std::size_t>(divisor);
    event->datatype = in_bytes ? "ncclInt8" : task.is_bf16 ? "ncclBfloat16" : "ncclFloat32";
  }

  /// From 2.29 on a Broadcast's task has no event mask (v2.30.7-1 `src/enqueue.cc:369`): nothing
  /// but its CollApi is heard of.
  bool is_heard_of(const Task& task) const {
    return task.collective != kBroadcast || !has_allgatherv();
  }

  void launch(const Group& group) {
    const Profiler& profiler = process_.profiler;
    const bool has_kernels = (group.mask & ncclProfileKernelCh) != 0;
    void* plan = nullptr;
    std::vector<void*> started;
    auto call = group.calls.begin();
    for (const auto& [tasks, outcome] : group.aggregates) {
      for (const Task& task : tasks) {
        void* parent = call != group.calls.end() ? *call++ : nullptr;
        const std::uint64_t sequence = sequence_[task.collective];
        if (!group.is_captured || has_kernels) ++sequence_[task.collective];
        if ((group.mask & ncclProfileColl) == 0 && !has_kernels) continue;
        if (!is_heard_of(task)) continue;
        if (plan == nullptr) plan = start(ncclProfileGroup, nullptr);
        if (!has_api_events()) parent = plan;
        started.push_back(start(ncclProfileColl, parent, [&, &to = outcome](auto* descriptor) {
          describe(task, &descriptor->coll);
          descriptor->coll.seqNumber = sequence;
          descriptor->coll.nChannels = static_cast<std::uint8_t>(to.num_channels);
          descriptor->coll.nWarps = 17;
          descriptor->coll.algo = kAlgorithmNames[to.algorithm];
          descriptor->coll.proto = kProtocolNames[to.protocol];
        }));
        if (has_kernels) deliver(started.back(), task, outcome);
      }
    }
    for (void* handle : started) profiler.stop(handle);
    profiler.stop(plan);
  }

  /// The KernelCh events of a collective. They come late, out of order, twice or never: no event at
  /// all, or a start that is never stopped.
  void deliver(void* collective, const Task& task, const Outcome& outcome) {
    const Options& options = process_.options;
    const auto draw = [&](int below) {
      const std::uint64_t drawn = mixed(mixed(options["seed"], rank_), ++num_drawn_);
      return static_cast<int>(drawn % static_cast<unsigned>(below));
    };
    const int cell = outcome.algorithm * kNumProtocols + outcome.protocol;
    const double cost_us =
        model_.costs(task.collective, task.size_bytes)[static_cast<std::size_t>(cell)];
    const double factor = (cell == options.slow_cell ? options.slow_factor : 1) *
                          (1 + 1e-8 * options["scatter"] * draw(1'000'000));
    const std::uint64_t start_ns = now_ns();
    const std::uint64_t stop_ns =
        start_ns + static_cast<std::uint64_t>(1000 * std::max(1.0, cost_us) * factor);
    for (int channel = 0; channel < outcome.num_channels; ++channel) {
      const bool is_dropped = draw(100) < options["kernel-drop"];
      if (is_dropped && draw(2) == 0) continue;
      const auto tell_of_it = [=] {
        const auto apart_ns = static_cast<std::uint64_t>(10 * channel);
        void* event = start(ncclProfileKernelCh, collective, [=](auto* descriptor) {
          descriptor->kernelCh.channelId = static_cast<std::uint8_t>(channel);
          descriptor->kernelCh.pTimer = start_ns + apart_ns;
        });
        if (is_dropped) return;
        ncclProfilerEventStateArgs_v4_t arguments = {{stop_ns - apart_ns}};
        process_.profiler.record(event, ncclProfilerKernelChStop, &arguments);
        process_.profiler.stop(event);
      };
      const auto late_ns = static_cast<std::uint64_t>(draw(1000 * options["kernel-delay-us"] + 1));
      process_.proxy.add(this, stop_ns + late_ns, tell_of_it);
      if (draw(100) >= options["kernel-duplicate"]) continue;
      process_.proxy.add(this, stop_ns + late_ns, tell_of_it);
    }
  }

  Process& process_;
  const int rank_;
  const CostModel model_;
  bool has_tuner_ = false, has_profiler_ = false;
  void* tuner_context_ = nullptr;
  void* profiler_context_ = nullptr;
  std::atomic<std::uint64_t> sequence_[kNumCollectives] = {};
  std::uint64_t num_asked_ = 0;
  std::atomic<std::uint64_t> num_drawn_{0};
  std::mutex inside_;
  std::atomic<std::uint64_t> asking_since_ns_{0};  // 0: the thread is not in the plugin
  std::atomic<bool> aborting_{false};
};
