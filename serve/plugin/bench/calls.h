// Timing of getCollInfo, for the benchmarks. Calls are timed in batches, since one call is as short
// as reading the clock. Sizes and collectives are drawn at random, as a job's look to a branch
// predictor.
#pragma once

#include <time.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "nccl/tuner_abi.h"

inline constexpr int kBatches = 20000;
inline constexpr int kWarmupBatches = 1000;
inline constexpr int kBatchCalls = 64;
inline constexpr int kCells = 21;

/// The NCCL that a tuner finds in this process (ENABLE_EXPORTS).
extern "C" __attribute__((visibility("default"))) int ncclGetVersion(int* version) {
  *version = 23007;
  return 0;
}

struct Question {
  int collective;
  std::size_t size_bytes;
  float costs[kCells];
};

inline double now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return 1e9 * static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec);
}

inline std::vector<Question> random_questions(std::mt19937_64* random) {
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
inline std::vector<double> measure(const ncclTuner_v5_t& tuner, void* context) {
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

inline double quantile(const std::vector<double>& sorted, double share) {
  return sorted[static_cast<std::size_t>(share * static_cast<double>(sorted.size() - 1))];
}
