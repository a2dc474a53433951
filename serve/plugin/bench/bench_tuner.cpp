// What the tuner of a job costs a rank: one getCollInfo with a table in force, memory, threads, and
// how often these wake up in a steady job.
//
//   bench_tuner LIBRARY RANKS     with the tuner's environment set; prints JSON
//
// RANKS processes make one communicator; the last one measures. Calls are timed in batches, since
// one call is as short as reading the clock. Sizes and collectives are drawn at random, as a job's
// look to a branch predictor.
#include <dirent.h>
#include <dlfcn.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "nccl/profiler_abi.h"
#include "nccl/tuner_abi.h"

/// The NCCL that a tuner finds in this process (ENABLE_EXPORTS).
extern "C" __attribute__((visibility("default"))) int ncclGetVersion(int* version) {
  *version = 23007;
  return 0;
}

namespace {

constexpr int kBatches = 20'000, kWarmupBatches = 1'000, kBatchCalls = 64, kCells = 21;

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

constexpr unsigned kSteadySeconds = 3;

/// A field of a file of the kernel's, "Name:  123 kB".
long field_of(const std::string& path, const char* name) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.compare(0, std::strlen(name), name) == 0) {
      return std::atol(line.c_str() + std::strlen(name) + 1);
    }
  }
  return 0;
}

long private_kib() {
  const std::string path = "/proc/self/smaps_rollup";
  return field_of(path, "Private_Clean") + field_of(path, "Private_Dirty");
}

/// Times that the threads of this process other than the caller have gone to sleep.
long other_threads_sleeps(int* num_threads) {
  const std::string self = std::to_string(syscall(SYS_gettid));
  DIR* tasks = opendir("/proc/self/task");
  long sleeps = 0;
  *num_threads = 0;
  while (const dirent* task = readdir(tasks)) {
    const std::string name = task->d_name;
    if (name[0] == '.' || name == self) continue;
    ++*num_threads;
    sleeps += field_of("/proc/self/task/" + name + "/status", "voluntary_ctxt_switches");
  }
  closedir(tasks);
  return sleeps;
}

/// One rank's side of the communicator, in a library that may want to be told of its calls too.
struct Rank {
  Rank(const char* path, int number, int num_ranks) {
    void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      std::fprintf(stderr, "%s\n", dlerror());
      std::exit(3);
    }
    const auto* profiler = static_cast<const ncclProfiler_v5_t*>(dlsym(library, "ncclProfiler_v5"));
    static int mask = 0;
    void* ignored = nullptr;
    if (profiler != nullptr) {
      profiler->init(&ignored, 0x1234, &mask, "bench", 1, num_ranks, number, nullptr);
    }
    tuner = static_cast<const ncclTuner_v5_t*>(dlsym(library, "ncclTunerPlugin_v5"));
    tuner->init(&context, 0x1234, static_cast<std::size_t>(num_ranks), 1, nullptr, nullptr,
                nullptr);
    if (context == nullptr) std::exit(4);
  }
  const ncclTuner_v5_t* tuner = nullptr;
  void* context = nullptr;
};

}  // namespace

int main(int count, char** arguments) {
  if (count != 3) return 2;
  const int num_ranks = std::atoi(arguments[2]);
  std::vector<pid_t> others;
  for (int rank = 0; rank + 1 < num_ranks; ++rank) {
    const pid_t pid = fork();
    if (pid != 0) {
      others.push_back(pid);
      continue;
    }
    const Rank created(arguments[1], rank, num_ranks);
    pause();  // a job that goes on
    return 0;
  }
  const long before_kib = private_kib();
  const Rank last(arguments[1], num_ranks - 1, num_ranks);
  const long after_kib = private_kib();
  int num_threads = 0;
  const std::vector<double> empty = measure(*last.tuner, nullptr);
  const std::vector<double> full = measure(*last.tuner, last.context);
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
      quantile(full, 0.5), quantile(full, 0.99), quantile(empty, 0.5),
      static_cast<double>(after_kib - before_kib) / 1024.0,
      static_cast<double>(woken) / kSteadySeconds, num_threads);
  return 0;
}
