// What a library costs a rank, as JSON.
//
//   bench TUNER RANKS   with the tuner's environment set: one getCollInfo with a table in force,
//                       memory, threads, and how often these wake up in a steady job. RANKS
//                       processes make one communicator; the last one measures.
//   bench PROFILER      one recorded call: all that NCCL 2.28 tells of it under the mask which the
//                       profiler asks for, reading the clock included. The files go to a temporary
//                       directory, to which the writer writes meanwhile, and are removed.
//
// Calls are timed in batches, since one is about as short as reading the clock. Of a tuner sizes
// and collectives are drawn at random, as a job's look to a branch predictor; of a profiler a pause
// follows each batch: a job's collectives do not come back to back for seconds, and the recorder's
// memory has an end.
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

#include "tests/library.h"

namespace {

constexpr int kBatches = 20'000, kWarmupBatches = 1'000, kBatchCalls = 64;
constexpr unsigned kSteadySeconds = 3;

/// Nanoseconds per call of each batch, sorted. What `prepare` takes before each is not counted.
template <typename Prepare, typename Make>
std::vector<double> measure(const Prepare& prepare, const Make& call) {
  std::vector<double> call_ns;
  for (int batch = -kWarmupBatches; batch < kBatches; ++batch) {
    prepare();
    const auto start = std::chrono::steady_clock::now();
    for (std::size_t i = 0; i < kBatchCalls; ++i) call(i);
    const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - start;
    if (batch >= 0) call_ns.push_back(took.count() / kBatchCalls);
  }
  std::sort(call_ns.begin(), call_ns.end());
  return call_ns;
}
double p50(const std::vector<double>& sorted) { return sorted[sorted.size() / 2]; }
double p99(const std::vector<double>& sorted) { return sorted[sorted.size() * 99 / 100]; }

std::vector<double> measure_questions(const ncclTuner_v5_t& tuner, void* context) {
  struct Question {
    int collective;
    std::size_t size_bytes;
    float costs[21];
  };
  std::mt19937_64 random(20260101);
  std::uniform_real_distribution<double> log2_size(3.0, 34.0);
  std::uniform_real_distribution<float> cost(5.0F, 500.0F);
  std::vector<Question> questions(kBatchCalls);
  const auto draw = [&] {
    for (Question& question : questions) {
      question.collective = static_cast<int>(random() % 5);
      question.size_bytes = static_cast<std::size_t>(std::exp2(log2_size(random)));
      for (float& cell : question.costs) cell = random() % 3 == 0 ? -1.0F : cost(random);
    }
  };
  return measure(draw, [&](std::size_t i) {
    int num_channels = 0;
    tuner.getCollInfo(context, questions[i].collective, questions[i].size_bytes, 1,
                      reinterpret_cast<float**>(questions[i].costs), 7, 3, 0, &num_channels);
  });
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

int bench_tuner(const char* path, std::size_t num_ranks) {
  std::vector<pid_t> others;
  while (others.size() + 1 < num_ranks) {
    others.push_back(fork());
    if (others.back() != 0) continue;
    Library(path, 1).init(5, num_ranks, 1, nullptr);
    pause();  // a job that goes on
    return 0;
  }
  const long before_kib = sum_of("/proc/self/smaps_rollup", "Private_");
  const Library library(path, 1);
  void* context = library.init(5, num_ranks, 1, nullptr);
  const long kib = sum_of("/proc/self/smaps_rollup", "Private_") - before_kib;
  if (context == nullptr) return 4;
  const auto& tuner = *library.at<ncclTuner_v5_t>(5);
  const std::vector<double> empty = measure_questions(tuner, nullptr);
  const std::vector<double> full = measure_questions(tuner, context);
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
      p50(full), p99(full), p50(empty), static_cast<double>(kib) / 1024.0,
      static_cast<double>(woken) / kSteadySeconds, num_threads);
  return 0;
}

int bench_profiler(const char* path) {
  const std::filesystem::path directory =
      std::filesystem::temp_directory_path() / ("bench-record-" + std::to_string(getpid()));
  setenv("DYNAMICCL_CALLS_DIR", directory.c_str(), 1);
  const Library library(path);
  const auto* profiler = library.profiler<ncclProfiler_v5_t>(5);
  int mask = 0;
  void* context = nullptr;
  profiler->init(&context, 1, &mask, "", 1, 8, 0, nullptr);
  if (context == nullptr) return 4;
  ncclProfilerEventDescr_v5_t event = {};
  const auto start = [&](unsigned type, void* parent) {
    event.type = type;
    event.parentObj = parent;
    void* handle = nullptr;
    profiler->startEvent(context, &handle, &event);
    return handle;
  };
  std::uint64_t number = 0;
  const auto record = [&](std::size_t) {
    static const char* const kNames[][2] = {
        {"AllReduce", "RING"}, {"AllGather", "TREE"}, {"ReduceScatter", "NVLS"}};
    const auto& [func, algorithm] = kNames[number % 3];
    void* const group = start(ncclProfileGroupApi, nullptr);
    event.collApi = {};
    void* const api = start(ncclProfileCollApi, group);
    start(ncclProfileGroup, nullptr);
    event.coll = {number++ / 3,  func, nullptr, nullptr,   1 << 18, 0,
                  "ncclFloat32", 8,    16,      algorithm, "SIMPLE"};
    start(ncclProfileColl, api);
    start(ncclProfileKernelLaunch, group);
  };
  const auto pause = [] { std::this_thread::sleep_for(std::chrono::microseconds(50)); };
  const std::vector<double> call_ns = measure(pause, record);
  profiler->finalize(context);
  std::filesystem::remove_all(directory);
  std::printf("{\"record_ns\": %.2f, \"record_p99_ns\": %.2f}\n", p50(call_ns), p99(call_ns));
  return 0;
}

}  // namespace

int main(int count, char** arguments) {
  if (count == 2) return bench_profiler(arguments[1]);
  return count == 3 ? bench_tuner(arguments[1], std::strtoul(arguments[2], nullptr, 10)) : 2;
}
