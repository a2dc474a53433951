// Time of one getCollInfo, as NCCL makes it on the host before every collective.
//
//   bench_plugin PLUGIN RANKS NODES     with the plugin's environment set; prints JSON
//
// Calls are timed in batches, since one call is as short as reading the clock. Sizes and
// collectives are drawn at random, as a job's look to a branch predictor. Sweep mode is measured as
// well, from a schedule of its own, with a report: there the calls are those of a benchmark.
#include <dlfcn.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "nccl/tuner_abi.h"
#include "tests/schedule_file.h"

namespace {

constexpr int kBatches = 20000;
constexpr int kWarmupBatches = 1000;
constexpr int kBatchCalls = 64;
constexpr int kCells = 21;

struct Question {
  int collective;
  std::size_t size_bytes;
  float costs[kCells];
};

double now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return 1e9 * static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec);
}

std::vector<Question> random_questions(std::mt19937_64* random) {
  std::vector<Question> questions(kBatchCalls);
  std::uniform_real_distribution<double> log2_size(3.0, 34.0);
  std::uniform_real_distribution<float> cost(5.0F, 500.0F);
  for (Question& question : questions) {
    question.collective = static_cast<int>((*random)() % 5);
    question.size_bytes = static_cast<std::size_t>(std::exp2(log2_size(*random)));
    for (float& cell : question.costs) cell = (*random)() % 3 == 0 ? -1.0F : cost(*random);
  }
  return questions;
}

/// Nanoseconds per call of each batch, sorted. A benchmark asks about one size and collective.
std::vector<double> measure(const ncclTuner_v5_t& tuner, void* context,
                            const Plan* plan = nullptr) {
  std::mt19937_64 random(20260101);
  std::vector<double> call_ns;
  for (int batch = -kWarmupBatches; batch < kBatches; ++batch) {
    std::vector<Question> questions = random_questions(&random);
    for (Question& question : questions) {
      if (plan == nullptr) continue;
      question.collective = plan->collective;
      question.size_bytes = plan->sizes[0];
    }
    int num_channels = 0;
    const double start = now_ns();
    for (Question& question : questions) {
      num_channels = 0;
      tuner.getCollInfo(context, question.collective, question.size_bytes, 1,
                        reinterpret_cast<float**>(question.costs), 7, 3, 0, &num_channels);
    }
    const double stop = now_ns();
    if (batch >= 0) call_ns.push_back((stop - start) / kBatchCalls);
  }
  std::sort(call_ns.begin(), call_ns.end());
  return call_ns;
}

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

double quantile(const std::vector<double>& sorted, double share) {
  return sorted[static_cast<std::size_t>(share * static_cast<double>(sorted.size() - 1))];
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 4) return 2;
  void* library = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return 3;
  const auto* tuner = static_cast<const ncclTuner_v5_t*>(dlsym(library, "ncclTunerPlugin_v5"));
  const int num_ranks = std::atoi(arguments[2]), num_nodes = std::atoi(arguments[3]);
  const auto create = [&] {
    void* context = nullptr;
    tuner->init(&context, 1, static_cast<std::size_t>(num_ranks),
                static_cast<std::size_t>(num_nodes), nullptr, nullptr, nullptr);
    return context;
  };
  void* context = create();
  if (context == nullptr) return 4;
  const std::vector<double> empty = measure(*tuner, nullptr);
  const std::vector<double> full = measure(*tuner, context);
  tuner->finalize(context);

  const std::filesystem::path parent = std::filesystem::temp_directory_path();
  const std::string name = "bench-" + std::to_string(getpid());
  const SweepDirectory sweep(parent, name);
  const Plan plan = long_plan(num_ranks, num_nodes);
  sweep.write(schedule_of(plan));
  sweep.ask_for_report();
  context = create();
  if (context == nullptr) return 5;
  const std::vector<double> played = measure(*tuner, context, &plan);
  tuner->finalize(context);
  const Bytes report = sweep.read_report();
  const bool all_were =
      report_stop(report) == 0 && report_calls(report) == (kBatches + kWarmupBatches) * kBatchCalls;
  std::filesystem::remove_all(parent / ("sweep-" + name));
  if (!all_were) return 6;
  std::printf(
      "{\"getcollinfo_p50_ns\": %.2f, \"getcollinfo_p99_ns\": %.2f, "
      "\"sweep_getcollinfo_p50_ns\": %.2f, \"sweep_getcollinfo_p99_ns\": %.2f, "
      "\"baseline_empty_call_p50_ns\": %.2f}\n",
      quantile(full, 0.5), quantile(full, 0.99), quantile(played, 0.5), quantile(played, 0.99),
      quantile(empty, 0.5));
  return 0;
}
