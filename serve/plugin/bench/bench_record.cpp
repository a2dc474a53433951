// Time of recording one collective: prints JSON; the files go to a temporary directory and are
// removed.
//
// What NCCL's caller pays for a call: all that NCCL 2.28 tells of it under the mask which the
// profiler asks for, reading the clock included. The writer writes to a real file meanwhile. Calls
// are timed in batches, since one is about as short as reading the clock, with a pause after each:
// a job's collectives do not come back to back for seconds, and the recorder's memory has an end.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "profiler/profiler.h"

extern "C" const ncclProfiler_v5_t ncclProfiler_v5;

using namespace dynamiccl;
using Clock = std::chrono::steady_clock;

namespace {

constexpr int kBatches = 10'000, kWarmupBatches = 1'000, kBatchCalls = 64;

void* g_profiler = nullptr;
ncclProfilerEventDescr_v5_t g_event = {};

void* start(unsigned type, void* parent) {
  g_event.type = type;
  g_event.parentObj = parent;
  void* handle = nullptr;
  ncclProfiler_v5.startEvent(g_profiler, &handle, &g_event);
  return handle;
}

void call(std::uint64_t number) {
  static const char* const kNames[][2] = {
      {"AllReduce", "RING"}, {"AllGather", "TREE"}, {"ReduceScatter", "NVLS"}};
  const auto& [func, algorithm] = kNames[number % 3];
  void* const group = start(ncclProfileGroupApi, nullptr);
  g_event.collApi = {};
  void* const api = start(ncclProfileCollApi, group);
  start(ncclProfileGroup, nullptr);
  g_event.coll = {number / 3,    func, nullptr, nullptr,   1 << 18, 0,
                  "ncclFloat32", 8,    16,      algorithm, "SIMPLE"};
  start(ncclProfileColl, api);
  start(ncclProfileKernelLaunch, group);
}

}  // namespace

int main() {
  const std::filesystem::path directory =
      std::filesystem::temp_directory_path() / ("bench-record-" + std::to_string(getpid()));
  setenv("DYNAMICCL_CALLS_DIR", directory.c_str(), 1);
  int mask = 0;
  ncclProfiler_v5.init(&g_profiler, 1, &mask, "", 1, 8, 0, nullptr);
  if (g_profiler == nullptr) return 4;
  std::vector<double> call_ns;
  std::uint64_t number = 0;
  for (int batch = -kWarmupBatches; batch < kBatches; ++batch) {
    const auto begin = Clock::now();
    for (int i = 0; i < kBatchCalls; ++i) call(number++);
    const std::chrono::duration<double, std::nano> took = Clock::now() - begin;
    if (batch >= 0) call_ns.push_back(took.count() / kBatchCalls);
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  ncclProfiler_v5.finalize(g_profiler);
  std::filesystem::remove_all(directory);
  std::sort(call_ns.begin(), call_ns.end());
  std::printf("{\"record_ns\": %.2f, \"record_p99_ns\": %.2f}\n", call_ns[kBatches / 2],
              call_ns[kBatches * 99 / 100]);
  return 0;
}
