// Time of recording one collective, and how many are lost at a high rate.
//
//   bench_record PLUGIN      prints JSON; the files go to a temporary directory and are removed
//
// A recorded call is what NCCL's caller pays for it: all events that NCCL 2.28 starts under the
// mask which the profiler asks for, and their ends where it gave a handle, reading the clock
// included (GroupApi, CollApi, Group, Coll, KernelLaunch). The writer writes to a real file
// meanwhile. Calls are timed in batches, since one is about as short as reading the clock, and
// there is a pause after each: a job's collectives do not come back to back for seconds, and the
// ring has an end.
#include <dlfcn.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "nccl/profiler_abi.h"
#include "profiler/calls_file.h"

namespace {

constexpr int kBatches = 10'000;
constexpr int kWarmupBatches = 1'000;
constexpr int kBatchCalls = 64;
constexpr double kRate = 100'000.0;
constexpr double kSeconds = 5.0;
constexpr const char* kFuncs[] = {"AllReduce", "AllGather", "ReduceScatter"};
constexpr const char* kAlgorithms[] = {"RING", "TREE", "NVLS"};

double now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return 1e9 * static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec);
}

void pause_us(long duration_us) {
  const timespec pause = {0, 1000 * duration_us};
  nanosleep(&pause, nullptr);
}

class Caller {
 public:
  explicit Caller(const ncclProfiler_v5_t* profiler) : profiler_(profiler) {
    profiler_->init(&context_, 1, &mask_, "bench", 1, 8, 0, nullptr);
  }

  void call(std::uint64_t number) {
    void* const group_api = start(ncclProfileGroupApi, nullptr);
    void* const api = start(ncclProfileCollApi, group_api);
    stop(api);
    void* const group = start(ncclProfileGroup, nullptr);
    ncclProfilerEventDescr_v5_t event = {};
    event.type = ncclProfileColl;
    event.parentObj = api;
    event.coll = {number / 3,
                  kFuncs[number % 3],
                  nullptr,
                  nullptr,
                  1 << 18,
                  0,
                  "ncclFloat32",
                  static_cast<std::uint8_t>(8),
                  16,
                  kAlgorithms[number % 3],
                  "SIMPLE"};
    void* coll = nullptr;
    profiler_->startEvent(context_, &coll, &event);
    stop(start(ncclProfileKernelLaunch, group_api));
    stop(coll);
    stop(group);
    stop(group_api);
  }

  void finalize() { profiler_->finalize(context_); }
  bool is_recorded() const { return context_ != nullptr; }

 private:
  void* start(std::uint64_t type, void* parent) {
    ncclProfilerEventDescr_v5_t event = {};
    event.type = type;
    event.parentObj = parent;
    void* handle = nullptr;
    profiler_->startEvent(context_, &handle, &event);
    return handle;
  }
  void stop(void* handle) {
    if (handle != nullptr) profiler_->stopEvent(handle);
  }

  const ncclProfiler_v5_t* profiler_;
  void* context_ = nullptr;
  int mask_ = 0;
};

/// Nanoseconds per call of each batch, sorted.
std::vector<double> measure(Caller* caller) {
  std::vector<double> call_ns;
  std::uint64_t number = 0;
  for (int batch = -kWarmupBatches; batch < kBatches; ++batch) {
    const double start = now_ns();
    for (int i = 0; i < kBatchCalls; ++i) caller->call(number++);
    const double stop = now_ns();
    if (batch >= 0) call_ns.push_back((stop - start) / kBatchCalls);
    pause_us(50);
  }
  std::sort(call_ns.begin(), call_ns.end());
  return call_ns;
}

std::uint64_t call_at_rate(Caller* caller) {
  const double begin = now_ns();
  std::uint64_t made = 0;
  const auto all = static_cast<std::uint64_t>(kRate * kSeconds);
  while (made < all) {
    const auto due = static_cast<std::uint64_t>((now_ns() - begin) * 1e-9 * kRate);
    for (; made < std::min(due, all); ++made) caller->call(made);
    pause_us(100);
  }
  return made;
}

std::uint64_t records_in(const std::filesystem::path& directory) {
  std::uint64_t records = 0;
  for (const auto& file : std::filesystem::directory_iterator(directory)) {
    records += (file.file_size() - dynamiccl::kCallsHeaderBytes) / dynamiccl::kCallsEntryBytes;
  }
  return records;
}

double quantile(const std::vector<double>& sorted, double share) {
  return sorted[static_cast<std::size_t>(share * static_cast<double>(sorted.size() - 1))];
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 2) return 2;
  void* library = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return 3;
  const auto* profiler = static_cast<const ncclProfiler_v5_t*>(dlsym(library, "ncclProfiler_v5"));
  const std::filesystem::path directory =
      std::filesystem::temp_directory_path() / ("bench-record-" + std::to_string(getpid()));
  std::filesystem::create_directory(directory);
  chmod(directory.c_str(), 0700);
  setenv("DYNAMICCL_CALLS_DIR", directory.c_str(), 1);
  setenv("DYNAMICCL_MODE", "observe", 1);

  Caller timed(profiler);
  if (!timed.is_recorded()) return 4;
  const std::vector<double> call_ns = measure(&timed);
  timed.finalize();
  const std::uint64_t before = records_in(directory);

  Caller fast(profiler);
  const std::uint64_t made = call_at_rate(&fast);
  fast.finalize();
  const std::uint64_t kept = records_in(directory) - before;
  std::filesystem::remove_all(directory);
  std::printf(
      "{\"record_ns\": %.2f, \"record_p99_ns\": %.2f, \"record_drops\": %llu, "
      "\"record_calls_per_s\": %.0f}\n",
      quantile(call_ns, 0.5), quantile(call_ns, 0.99), static_cast<unsigned long long>(made - kept),
      kRate);
  return 0;
}
