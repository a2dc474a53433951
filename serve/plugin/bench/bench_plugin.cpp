// Time of one getCollInfo, as NCCL makes it on the host before every collective.
//
//   bench_plugin PLUGIN RANKS NODES     with the plugin's environment set; prints JSON
//
// Calls are timed in batches, since one call is as short as reading the clock. Sizes and
// collectives are drawn at random, as a job's look to a branch predictor.
#include <dlfcn.h>
#include <time.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "nccl/tuner_abi.h"

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

/// Nanoseconds per call of each batch, sorted.
std::vector<double> measure(const ncclTuner_v5_t& tuner, void* context) {
  std::mt19937_64 random(20260101);
  std::vector<double> call_ns;
  for (int batch = -kWarmupBatches; batch < kBatches; ++batch) {
    std::vector<Question> questions = random_questions(&random);
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

double quantile(const std::vector<double>& sorted, double share) {
  return sorted[static_cast<std::size_t>(share * static_cast<double>(sorted.size() - 1))];
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 4) return 2;
  void* library = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return 3;
  const auto* tuner = static_cast<const ncclTuner_v5_t*>(dlsym(library, "ncclTunerPlugin_v5"));
  void* context = nullptr;
  tuner->init(&context, 1, std::strtoul(arguments[2], nullptr, 10),
              std::strtoul(arguments[3], nullptr, 10), nullptr, nullptr, nullptr);
  if (context == nullptr) return 4;
  const std::vector<double> empty = measure(*tuner, nullptr);
  const std::vector<double> full = measure(*tuner, context);
  tuner->finalize(context);
  std::printf(
      "{\"getcollinfo_p50_ns\": %.2f, \"getcollinfo_p99_ns\": %.2f, "
      "\"baseline_empty_call_p50_ns\": %.2f}\n",
      quantile(full, 0.5), quantile(full, 0.99), quantile(empty, 0.5));
  return 0;
}
