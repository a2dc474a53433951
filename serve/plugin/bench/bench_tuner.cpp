// What the tuner of a job costs a rank: one getCollInfo with a table in force, memory, threads, and
// how often these wake up in a steady job.
//
//   bench_tuner LIBRARY RANKS     with the tuner's environment set; prints JSON
//
// RANKS processes make one communicator; the last one measures. Calls are timed in batches, since
// one call is as short as reading the clock. Sizes and collectives are drawn at random, as a job's
// look to a branch predictor.
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <random>

#include "nccl/profiler_abi.h"
#include "tests/library.h"

namespace {

constexpr int kBatches = 20'000, kWarmupBatches = 1'000, kBatchCalls = 64;
constexpr unsigned kSteadySeconds = 3;

struct Question {
  int collective;
  std::size_t size_bytes;
  float costs[21];
};

/// Nanoseconds per call of each batch, sorted.
std::vector<double> measure(const ncclTuner_v5_t& tuner, void* context) {
  std::mt19937_64 random(20260101);
  std::uniform_real_distribution<double> log2_size(3.0, 34.0);
  std::uniform_real_distribution<float> cost(5.0F, 500.0F);
  std::vector<double> call_ns;
  for (int batch = -kWarmupBatches; batch < kBatches; ++batch) {
    std::vector<Question> questions(kBatchCalls);
    for (Question& question : questions) {
      question.collective = static_cast<int>(random() % 5);
      question.size_bytes = static_cast<std::size_t>(std::exp2(log2_size(random)));
      for (float& cell : question.costs) cell = random() % 3 == 0 ? -1.0F : cost(random);
    }
    const auto start = std::chrono::steady_clock::now();
    for (Question& question : questions) {
      int num_channels = 0;
      tuner.getCollInfo(context, question.collective, question.size_bytes, 1,
                        reinterpret_cast<float**>(question.costs), 7, 3, 0, &num_channels);
    }
    const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - start;
    if (batch >= 0) call_ns.push_back(took.count() / kBatchCalls);
  }
  std::sort(call_ns.begin(), call_ns.end());
  return call_ns;
}

/// The sum of the fields of a file of the kernel's whose names begin so: "Name:  123 kB".
long sum_of(const std::string& path, const std::string& name) {
  long sum = 0;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.rfind(name, 0) == 0) sum += std::atol(line.c_str() + line.find(':') + 1);
  }
  return sum;
}

/// Times that the threads of this process other than the caller have gone to sleep.
long other_threads_sleeps(int* num_threads) {
  long sleeps = 0;
  *num_threads = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    if (task.path().filename() == std::to_string(syscall(SYS_gettid))) continue;
    ++*num_threads;
    sleeps += sum_of(task.path() / "status", "voluntary_ctxt_switches");
  }
  return sleeps;
}

/// One rank's side of the communicator, in a library that may want to be told of its calls too.
const ncclTuner_v5_t* create(const char* path, int rank, int num_ranks, void** context) {
  static const Library library(path);
  void* handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  const auto* profiler = static_cast<const ncclProfiler_v5_t*>(dlsym(handle, "ncclProfiler_v5"));
  static int mask = 0;
  void* ignored = nullptr;
  if (profiler != nullptr) {
    profiler->init(&ignored, 0x1234, &mask, "bench", 1, num_ranks, rank, nullptr);
  }
  const auto* tuner = library.at<ncclTuner_v5_t>(5);
  const auto count = static_cast<std::size_t>(num_ranks);
  tuner->init(context, 0x1234, count, 1, nullptr, nullptr, nullptr);
  if (*context == nullptr) std::exit(4);
  return tuner;
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 3) return 2;
  const int last = std::atoi(arguments[2]) - 1;
  void* context = nullptr;
  std::vector<pid_t> others;
  for (int rank = 0; rank < last; ++rank) {
    others.push_back(fork());
    if (others.back() != 0) continue;
    create(arguments[1], rank, last + 1, &context);
    pause();  // a job that goes on
    return 0;
  }
  const long before_kib = sum_of("/proc/self/smaps_rollup", "Private_");
  const ncclTuner_v5_t* tuner = create(arguments[1], last, last + 1, &context);
  const long kib = sum_of("/proc/self/smaps_rollup", "Private_") - before_kib;
  const std::vector<double> empty = measure(*tuner, nullptr), full = measure(*tuner, context);
  int num_threads = 0;
  const long slept = other_threads_sleeps(&num_threads);
  sleep(kSteadySeconds);
  const long woken = other_threads_sleeps(&num_threads) - slept;
  for (const pid_t pid : others) {
    kill(pid, SIGTERM);
    waitpid(pid, nullptr, 0);
  }
  std::printf(
      "{\"getcollinfo_p50_ns\": %.2f, \"getcollinfo_p99_ns\": %.2f, "
      "\"baseline_empty_call_p50_ns\": %.2f, \"rss_table_mib\": %.3f, \"wakeups_per_s\": %.1f, "
      "\"job_threads\": %d}\n",
      full[full.size() / 2], full[full.size() * 99 / 100], empty[empty.size() / 2],
      static_cast<double>(kib) / 1024.0, static_cast<double>(woken) / kSteadySeconds, num_threads);
  return 0;
}
