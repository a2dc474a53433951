// Time of one getCollInfo in two libraries: the one of mode adaptive, which can switch tables, and
// the one of sweep mode, which plays a schedule (its own, with a report).
//
//   bench_plugin ADAPTIVE SWEEP RANKS NODES      prints JSON
//
// The environment of ADAPTIVE must be set, with a table of two ranks.
#include <dlfcn.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "bench/calls.h"
#include "nccl/profiler_abi.h"
#include "tests/schedule_file.h"

namespace {

/// Random configs, a new one every 44 calls, as with nccl-tests' 20 timed calls; and calls enough.
Plan long_plan(int num_ranks, int num_nodes) {
  std::mt19937_64 random(20260102);
  Plan plan;
  plan.num_ranks = num_ranks;
  plan.num_nodes = num_nodes;
  plan.calls_per_half = 22;
  plan.warmup.clear();
  plan.sizes = {1 << 20};
  plan.configs = {{-1, -1, 0, 0, 0}};
  for (const int algorithm : {0, 1, 2, 3, 4, 5}) {
    for (const int protocol : {dynamiccl::kAuto, 0, 1, 2}) {
      const bool exists =
          protocol == dynamiccl::kAuto || dynamiccl::kValid[plan.collective][algorithm][protocol];
      if (!exists) continue;
      plan.configs.push_back(
          {static_cast<std::int8_t>(algorithm), static_cast<std::int8_t>(protocol), 8, 1, 0});
    }
  }
  const int num_blocks = (kBatches + kWarmupBatches) * kBatchCalls / plan.calls_per_block() + 1;
  plan.blocks.resize(static_cast<std::size_t>(num_blocks));
  for (std::uint16_t& block : plan.blocks) {
    block = static_cast<std::uint16_t>(random() % plan.configs.size());
  }
  return plan;
}

/// Two ranks of one communicator as threads of this process: creates them, waits until both have
/// the table, and returns the first one's tuner.
struct TwoRanks {
  explicit TwoRanks(void* library)
      : tuner(static_cast<const ncclTuner_v5_t*>(dlsym(library, "ncclTunerPlugin_v5"))),
        profiler(static_cast<const ncclProfiler_v5_t*>(dlsym(library, "ncclProfiler_v5"))) {
    std::thread other(&TwoRanks::run, this, 1);
    run(0);
    other.join();
  }
  ~TwoRanks() {
    for (int rank = 0; rank < 2; ++rank) {
      tuner->finalize(tuners[rank]);
      profiler->finalize(profilers[rank]);
    }
  }
  TwoRanks(const TwoRanks&) = delete;
  TwoRanks& operator=(const TwoRanks&) = delete;

  void run(int rank) {
    profiler->init(&profilers[rank], 7, &mask, "bench", 1, 2, rank, nullptr);
    tuner->init(&tuners[rank], 7, 2, 1, nullptr, nullptr, nullptr);
    if (tuners[rank] == nullptr) std::exit(4);
    for (bool is_decided = false; !is_decided; usleep(250)) {
      float costs[21];
      for (float& cost : costs) cost = 10.0F;
      int num_channels = 0;
      tuner->getCollInfo(tuners[rank], 4, 1 << 20, 1, reinterpret_cast<float**>(costs), 7, 3, 0,
                         &num_channels);
      for (const float cost : costs) is_decided = is_decided || cost == 0.0F;
      ncclProfilerEventDescr_v5_t launch = {};
      launch.type = ncclProfileKernelLaunch;
      void* handle = nullptr;
      profiler->startEvent(profilers[rank], &handle, &launch);
    }
  }

  const ncclTuner_v5_t* tuner;
  const ncclProfiler_v5_t* profiler;
  void *tuners[2] = {}, *profilers[2] = {};
  int mask = 0;
};

}  // namespace

int main(int count, char** arguments) {
  if (count != 5) return 2;
  const auto load = [](const char* path) {
    void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) std::exit(3);
    return library;
  };
  const TwoRanks ranks(load(arguments[1]));
  const std::vector<double> full = measure(*ranks.tuner, ranks.tuners[0]);

  const auto* player =
      static_cast<const ncclTuner_v5_t*>(dlsym(load(arguments[2]), "ncclTunerPlugin_v5"));
  const int num_ranks = std::atoi(arguments[3]), num_nodes = std::atoi(arguments[4]);
  const std::filesystem::path parent = std::filesystem::temp_directory_path();
  const std::string name = "bench-" + std::to_string(getpid());
  const SweepDirectory sweep(parent, name);
  const Plan plan = long_plan(num_ranks, num_nodes);
  sweep.write(schedule_of(plan));
  sweep.ask_for_report();
  const Question one = {plan.collective, plan.sizes[0], {}};
  void* context = nullptr;
  player->init(&context, 1, static_cast<std::size_t>(num_ranks),
               static_cast<std::size_t>(num_nodes), nullptr, nullptr, nullptr);
  if (context == nullptr) return 5;
  const std::vector<double> played = measure(*player, context, &one);
  player->finalize(context);
  const Bytes report = sweep.read_report();
  const bool all_were =
      report_stop(report) == 0 && report_calls(report) == (kBatches + kWarmupBatches) * kBatchCalls;
  std::filesystem::remove_all(parent / ("sweep-" + name));
  if (!all_were) return 6;
  std::printf(
      "{\"adaptive_getcollinfo_p50_ns\": %.2f, \"adaptive_getcollinfo_p99_ns\": %.2f, "
      "\"sweep_getcollinfo_p50_ns\": %.2f, \"sweep_getcollinfo_p99_ns\": %.2f}\n",
      quantile(full, 0.5), quantile(full, 0.99), quantile(played, 0.5), quantile(played, 0.99));
  return 0;
}
