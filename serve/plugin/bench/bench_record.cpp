// Time of recording one collective.
//
//   bench_record PLUGIN      prints JSON; the files go to a temporary directory and are removed
//
// What NCCL's caller pays for a call: all events that NCCL 2.28 starts under the mask which the
// profiler asks for, and their ends where it gave a handle, reading the clock included (GroupApi,
// CollApi, Group, Coll, KernelLaunch). The writer writes to a real file meanwhile. Calls are timed
// in batches, since one is about as short as reading the clock, with a pause after each: a job's
// collectives do not come back to back for seconds, and the ring has an end.
#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "nccl/profiler_abi.h"

namespace {

constexpr int kBatches = 10'000, kWarmupBatches = 1'000, kBatchCalls = 64;

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;

const ncclProfiler_v5_t* g_profiler = nullptr;
void* g_context = nullptr;

void* start(std::uint64_t type, void* parent, const ncclProfilerColl_v4_t* coll = nullptr) {
  ncclProfilerEventDescr_v5_t event = {};
  event.type = type;
  event.parentObj = parent;
  if (coll != nullptr) event.coll = *coll;
  void* handle = nullptr;
  g_profiler->startEvent(g_context, &handle, &event);
  return handle;
}

void stop(void* handle) {
  if (handle != nullptr) g_profiler->stopEvent(handle);
}

void call(std::uint64_t number) {
  static const char* const kFuncs[] = {"AllReduce", "AllGather", "ReduceScatter"};
  static const char* const kAlgorithms[] = {"RING", "TREE", "NVLS"};
  void* const group_api = start(ncclProfileGroupApi, nullptr);
  void* const api = start(ncclProfileCollApi, group_api);
  stop(api);
  void* const group = start(ncclProfileGroup, nullptr);
  const ncclProfilerColl_v4_t event = {
      number / 3, kFuncs[number % 3],      nullptr, nullptr, 1 << 18, 0, "ncclFloat32", 8,
      16,         kAlgorithms[number % 3], "SIMPLE"};
  void* const coll = start(ncclProfileColl, api, &event);
  stop(start(ncclProfileKernelLaunch, group_api));
  stop(coll);
  stop(group);
  stop(group_api);
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 2) return 2;
  void* library = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return 3;
  g_profiler = static_cast<const ncclProfiler_v5_t*>(dlsym(library, "ncclProfiler_v5"));
  const std::filesystem::path directory =
      std::filesystem::temp_directory_path() / ("bench-record-" + std::to_string(getpid()));
  setenv("DYNAMICCL_CALLS_DIR", directory.c_str(), 1);
  int mask = 0;
  g_profiler->init(&g_context, 1, &mask, "bench", 1, 8, 0, nullptr);
  if (g_context == nullptr) return 4;

  std::vector<double> call_ns;
  std::uint64_t number = 0;
  for (int batch = -kWarmupBatches; batch < kBatches; ++batch) {
    const auto begin = Clock::now();
    for (int i = 0; i < kBatchCalls; ++i) call(number++);
    const std::chrono::duration<double, std::nano> took = Clock::now() - begin;
    if (batch >= 0) call_ns.push_back(took.count() / kBatchCalls);
    std::this_thread::sleep_for(microseconds(50));
  }
  std::sort(call_ns.begin(), call_ns.end());

  g_profiler->finalize(g_context);
  std::filesystem::remove_all(directory);
  std::printf("{\"record_ns\": %.2f, \"record_p99_ns\": %.2f}\n", call_ns[kBatches / 2],
              call_ns[kBatches * 99 / 100]);
  return 0;
}
