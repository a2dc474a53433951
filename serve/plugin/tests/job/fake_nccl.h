// NCCL as one process of a job has it, without GPUs: loads the plugins, creates communicators, asks
// the tuner and feeds the profiler as the release does, and computes what would run.
//
// Order of calls and threads: `src/init.cc`, `src/enqueue.cc`, `src/group.cc`, `src/plugin/*.cc`.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/job/cost_model.h"
#include "tests/job/plugin_calls.h"
#include "tests/job/proxy.h"

enum class Datatype : std::uint8_t { f32, bf16, fp8 };

/// One collective that the job calls.
struct Task {
  int collective;
  std::size_t size_bytes;  // as NCCL counts them for a tuner
  Datatype datatype;
};

/// What one aggregate of collectives would run; the same on all ranks, or the job hangs.
struct Outcome {
  int collective;
  std::size_t size_bytes;
  int algorithm;
  int protocol;
  int num_channels;
  std::uint32_t question;  // a hash of all that the choice may depend on
  bool acted;              // the plugin wrote something
};

/// A plugin's error made a collective or the creation of a communicator fail.
class NcclError : public std::runtime_error {
 public:
  NcclError(const std::string& where, int result)
      : std::runtime_error(where + " returned " + std::to_string(result)) {}
};

/// The calling thread was inside a communicator that another thread aborted.
class Aborted : public std::runtime_error {
 public:
  Aborted() : std::runtime_error("aborted") {}
};

/// One plugin file of the process: opened with the first communicator, closed with the last.
template <typename Calls>
class PluginFile {
 public:
  PluginFile(std::string path, const Release& release)
      : path_(std::move(path)), release_(release) {}
  /// Null when there is no plugin, or none of its structs is known.
  std::shared_ptr<const Calls> take();
  void give_back();

 private:
  const std::string path_;
  const Release& release_;
  std::mutex mutex_;
  void* library_ = nullptr;
  int users_ = 0;
};

struct ProcessOptions {
  std::string tuner_path;     // empty: none
  std::string profiler_path;  // empty: none
  ProxyHabits proxy;
  std::uint64_t seed = 1;
  int slow_cell = -1;  // algorithm x 3 + protocol whose kernels take `slow_factor` times as long
  double slow_factor = 1.0;
  double scatter_percent = 0.0;  // kernels take up to so much longer, by chance
};

/// State that NCCL has once a process.
class Process {
 public:
  Process(const Release& release, const ProcessOptions& options, Witness& witness);
  const Release& release;
  const ProcessOptions options;
  Witness& witness;
  PluginFile<TunerCalls> tuner;
  PluginFile<ProfilerCalls> profiler;
  int event_mask = 0;  // the plugin may write it at any time
  Proxy proxy;

  int mask() const { return __atomic_load_n(&event_mask, __ATOMIC_RELAXED); }
};

struct CommunicatorOptions {
  std::uint64_t comm_id;
  int rank;
  int num_ranks;
  int num_nodes;
};

/// Collectives of a group that NCCL decides on together.
struct Aggregate {
  std::vector<Task> tasks;
  Outcome outcome;
};

/// The events of one group's calls, open until it has been launched.
struct ApiEvents {
  int mask = 0;  // the event mask when it was called
  void* group = nullptr;
  std::vector<void*> collectives;  // one for each task, in the order of the calls
};

/// A captured group: what it runs at every launch, and its events if they come then.
struct Graph {
  std::vector<Aggregate> aggregates;
  ApiEvents events;
  bool has_host_nodes;
};

class Communicator {
 public:
  /// Throws NcclError when a plugin refuses.
  Communicator(Process& process, const CommunicatorOptions& options);

  /// One group of collectives, called, planned and launched. Throws NcclError or Aborted.
  std::vector<Outcome> run(const std::vector<Task>& tasks);

  /// Broadcasts of several roots in one group, which NCCL 2.29 and later run as one AllGatherV.
  std::vector<Outcome> broadcast_many(const std::vector<Task>& broadcasts);

  /// ncclSend and ncclRecv in a group of their own: a kernel runs, and no tuner is asked.
  void send_receive();

  /// ncclGroupSimulateEnd: the tuner is asked and nothing runs.
  void simulate(const std::vector<Task>& tasks);

  /// The tuner is asked about symmetric kernels, with numPipeOps 0, three times for each task.
  void ask_about_symmetric(const std::vector<Task>& tasks);

  Graph capture(const std::vector<Task>& tasks);
  /// Without a word to the tuner; the profiler hears of it only where the graph has host nodes.
  void replay(const Graph& graph);

  /// ncclCommDestroy.
  void destroy();
  /// ncclCommAbort, from any other thread, also while one is inside a call.
  void abort();

 private:
  enum Stay : int { outside, asking, elsewhere };

  /// The calling thread's stay inside a communicator, which an abort respects.
  class Inside {
   public:
    Inside(Communicator* communicator, Stay stay);
    ~Inside() { communicator_.stay_ = before_; }
    Inside(const Inside&) = delete;
    Inside& operator=(const Inside&) = delete;

   private:
    Communicator& communicator_;
    const int before_;
  };

  std::vector<Aggregate> aggregate(const std::vector<Task>& tasks) const;
  std::vector<Aggregate> prepare(const std::vector<Task>& tasks);
  TunerAnswer ask(Aggregate* aggregate, int num_pipe_ops);
  TunerAnswer ask_once(const TunerQuestion& question, const std::vector<float>& costs);
  void judge(const TunerQuestion& question, const std::vector<float>& before,
             const TunerAnswer& answer) const;
  ApiEvents call_api(const std::vector<Task>& tasks, bool captured) const;
  ApiEvents call_p2p_api() const;
  void end_api(ApiEvents* events) const;
  bool is_heard_of(const Task& task) const;
  bool is_any_heard_of(const std::vector<Task>& tasks) const;
  void launch_kernel(const ApiEvents& events) const;
  void launch(const std::vector<Aggregate>& aggregates, const ApiEvents& events, bool captured);
  void finalize(bool deliver_rest);

  Process& process_;
  const CommunicatorOptions options_;
  const CostModel model_;
  std::shared_ptr<const TunerCalls> tuner_;
  std::shared_ptr<const ProfilerCalls> profiler_;
  void* tuner_context_ = nullptr;
  void* profiler_context_ = nullptr;
  std::atomic<std::uint64_t> sequence_[dynamiccl::kNumCollectives] = {};
  std::uint64_t calls_ = 0;  // for the rank's own `regBuff`
  std::atomic<int> stay_{outside};
  std::atomic<std::uint64_t> since_ns_{0};
  std::atomic<bool> aborting_{false};
};
