// Loading plugins, and the life of a communicator.
#include "tests/job/fake_nccl.h"

#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <thread>
#include <utility>

#include "nccl/profiler_abi.h"

using namespace dynamiccl;

namespace {

// A call that has been inside the plugin for so long is waiting there. A shorter stay may not have
// reached the plugin yet, and NCCL itself does not survive an abort before that.
constexpr std::uint64_t kSurelyInsideNs = 200'000'000;

std::atomic<int> g_version{0};
// The logger has no argument that names the communicator, so there is one for the process.
std::atomic<Witness*> g_witness{nullptr};
thread_local bool t_is_ours = false;

}  // namespace

void set_witness(Witness* witness) { g_witness = witness; }

void adopt_thread() { t_is_ours = true; }

void nccl_log(ncclDebugLogLevel level, unsigned long, const char*, int, const char* format, ...) {
  Witness* witness = g_witness;
  if (witness == nullptr) return;
  char line[8192];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);
  if (!t_is_ours) witness->violation("logged from a thread of its own: " + std::string(line));
  witness->log(level, line);
}

template <typename Calls>
std::shared_ptr<const Calls> PluginFile<Calls>::take() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (path_.empty()) return nullptr;
  if (library_ == nullptr) {
    library_ = dlopen(path_.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library_ == nullptr) throw std::runtime_error(std::string("dlopen: ") + dlerror());
  }
  auto calls = std::make_shared<const Calls>(library_, release_);
  if (calls->version() == 0) return nullptr;
  ++users_;
  return calls;
}

template <typename Calls>
void PluginFile<Calls>::give_back() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (--users_ > 0) return;
  dlclose(library_);
  library_ = nullptr;
}

template class PluginFile<TunerCalls>;
template class PluginFile<ProfilerCalls>;

Process::Process(const Release& of, const ProcessOptions& chosen, Witness& told)
    : release(of),
      options(chosen),
      witness(told),
      tuner(options.tuner_path, release),
      profiler(options.profiler_path, release),
      proxy(options.proxy, options.seed) {
  g_version = release.version;
}

Communicator::Inside::Inside(Communicator* communicator, Stay stay)
    : communicator_(*communicator), before_(communicator->stay_) {
  communicator_.since_ns_ = now_ns();
  communicator_.stay_ = stay;
  if (communicator_.aborting_) {
    communicator_.stay_ = before_;
    throw Aborted();
  }
}

Communicator::Communicator(Process& process, const CommunicatorOptions& options)
    : process_(process),
      options_(options),
      model_{options.num_ranks, options.num_nodes, process.release.num_algorithms} {
  const std::uint64_t begin_ns = now_ns();
  profiler_ = process_.profiler.take();
  if (profiler_ != nullptr) {
    const ncclResult_t result =
        profiler_->init(&profiler_context_, options_.comm_id, &process_.event_mask,
                        options_.num_nodes, options_.num_ranks, options_.rank, nccl_log);
    if (result != ncclSuccess) {  // NCCL goes on without it
      process_.profiler.give_back();
      profiler_ = nullptr;
    }
  }
  tuner_ = process_.tuner.take();
  if (tuner_ != nullptr) {
    const ncclResult_t result = tuner_->init(&tuner_context_, options_.comm_id, options_.num_ranks,
                                             options_.num_nodes, nccl_log);
    if (result != ncclSuccess) throw NcclError("the tuner's init", result);
  }
  process_.witness.created(now_ns() - begin_ns);
}

std::vector<Outcome> Communicator::run(const std::vector<Task>& tasks) {
  const Inside inside(this, elsewhere);
  ApiEvents events = call_api(tasks, false);
  const std::vector<Aggregate> aggregates = prepare(tasks);
  if (is_any_heard_of(tasks)) launch_kernel(events);
  launch(aggregates, events, false);
  end_api(&events);
  std::vector<Outcome> outcomes;
  for (const Aggregate& aggregate : aggregates) outcomes.push_back(aggregate.outcome);
  return outcomes;
}

/// v2.29.7-1 `src/enqueue.cc:366,1580`, `src/scheduler/allgatherv_sched.cc`.
std::vector<Outcome> Communicator::broadcast_many(const std::vector<Task>& broadcasts) {
  if (!process_.release.has_allgatherv) return run(broadcasts);
  const Inside inside(this, elsewhere);
  ApiEvents events = call_api(broadcasts, false);
  Aggregate one = {{{kAllGather, 0, Datatype::f32}}, {}};
  for (const Task& task : broadcasts) {
    one.tasks[0].size_bytes = std::max(one.tasks[0].size_bytes, task.size_bytes);
  }
  one.outcome.collective = kAllGather;
  one.outcome.size_bytes = one.tasks[0].size_bytes;
  const TunerAnswer answer = ask(&one, 1);
  // Taken as it is, and the index of a channel.
  if (answer.num_channels > model_.num_channels()) {
    process_.witness.violation("asked AllGatherV for more channels than there are");
  }
  end_api(&events);  // the profiler hears no more of it
  return {one.outcome};
}

void Communicator::send_receive() {
  const Inside inside(this, elsewhere);
  ApiEvents events = call_p2p_api();
  launch_kernel(events);
  if (profiler_ != nullptr && (events.mask & ncclProfileP2p) != 0) {
    void* group = profiler_->start_group(profiler_context_);
    profiler_->stop(profiler_->start_p2p(profiler_context_, group, options_.rank));
    profiler_->stop(group);
  }
  end_api(&events);
}

void Communicator::simulate(const std::vector<Task>& tasks) {
  const Inside inside(this, elsewhere);
  ApiEvents events = call_api(tasks, false);
  for (Aggregate& aggregate : aggregate(tasks)) {
    ask(&aggregate, 1);
  }
  end_api(&events);
}

/// 2.31.0a7 `src/scheduler/symmetric_sched.cc:158`, `src/tuning/tuning.cc`.
void Communicator::ask_about_symmetric(const std::vector<Task>& tasks) {
  const Inside inside(this, elsewhere);
  for (const Task& task : tasks) {
    const std::vector<float> costs = model_.costs(task.collective, task.size_bytes, 1, false);
    for (int i = 0; i < 3; ++i) ask_once({task.collective, task.size_bytes, 0, 0}, costs);
  }
}

Graph Communicator::capture(const std::vector<Task>& tasks) {
  const Inside inside(this, elsewhere);
  Graph graph;
  graph.events = call_api(tasks, true);
  graph.aggregates = prepare(tasks);
  if (is_any_heard_of(tasks)) launch_kernel(graph.events);
  // Proxy operations need the host at every replay, and then the events come there.
  graph.has_host_nodes = options_.num_nodes > 1 || (graph.events.mask & ncclProfileKernelCh) != 0;
  if (!graph.has_host_nodes) launch(graph.aggregates, graph.events, true);
  end_api(&graph.events);
  return graph;
}

void Communicator::replay(const Graph& graph) {
  const Inside inside(this, elsewhere);
  if (!graph.has_host_nodes || profiler_ == nullptr) return;
  process_.proxy.run(this, [this, graph] { launch(graph.aggregates, graph.events, true); });
}

void Communicator::finalize(bool deliver_rest) {
  process_.proxy.finish(this, deliver_rest);
  if (tuner_ != nullptr) {
    const ncclResult_t result = tuner_->finalize(tuner_context_);
    if (result != ncclSuccess) throw NcclError("the tuner's finalize", result);
    process_.tuner.give_back();
  }
  if (profiler_ != nullptr) {
    if (profiler_context_ != nullptr) profiler_->finalize(profiler_context_);
    process_.profiler.give_back();
  }
}

void Communicator::destroy() { finalize(true); }

void Communicator::abort() {
  aborting_ = true;
  while (true) {
    const int stay = stay_;
    if (stay == outside) break;
    if (stay == asking && now_ns() - since_ns_ > kSurelyInsideNs) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  finalize(false);
}

/// A program that uses NCCL has this symbol, and a plugin may ask it.
extern "C" __attribute__((visibility("default"))) ncclResult_t ncclGetVersion(int* version);
ncclResult_t ncclGetVersion(int* version) {
  *version = g_version;
  return ncclSuccess;
}
