// Time of one policy step on the leader: a warm window for every collective and size bin.
//
//   bench_policy LIBRARY ARTIFACT SYSTEM NODES RANKS      prints JSON
//
// Called through the C interface from a thread of the plugin's own, as the plugin does.
#include <dlfcn.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "adaptive/brain/brain_abi.h"
#include "file.h"
#include "platform/threads.h"
#include "table.h"

namespace {

constexpr int kSteps = 50;

char** g_arguments;

double now_ms() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return 1e3 * static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_nsec);
}

double resident_mib() {
  std::ifstream file("/proc/self/statm");
  long pages = 0, resident = 0;
  file >> pages >> resident;
  return static_cast<double>(resident) * static_cast<double>(sysconf(_SC_PAGESIZE)) / (1 << 20);
}

dynamiccl_call random_call(double log2_size, std::mt19937_64* random) {
  std::uniform_real_distribution<double> noise(0.8, 1.6);
  return {static_cast<std::uint64_t>(std::min(std::exp2(log2_size), 4.6e18)),
          (20.0 + std::exp2(log2_size - 17.0)) * noise(*random),
          noise(*random),
          noise(*random) - 0.8,
          static_cast<std::int8_t>((*random)() % 6),
          static_cast<std::int8_t>((*random)() % 3),
          static_cast<std::int8_t>(1 + (*random)() % 32)};
}

std::vector<dynamiccl_task> warm_tasks(int first_bin, int num_bins, std::mt19937_64* random) {
  std::vector<dynamiccl_task> tasks;
  for (int collective = 0; collective < dynamiccl::kNumCollectives; ++collective) {
    for (int bin = first_bin; bin < first_bin + num_bins; ++bin) {
      dynamiccl_task task = {collective, bin, DYNAMICCL_WINDOW, DYNAMICCL_WINDOW, {}};
      for (dynamiccl_call& call : task.calls) call = random_call(bin / 4.0, random);
      tasks.push_back(task);
    }
  }
  return tasks;
}

int fail(const char* what, const char* reason) {
  std::fprintf(stderr, "%s: %s\n", what, reason);
  return 1;
}

int measure() {
  char reason[DYNAMICCL_REASON_BYTES] = "";
  const double before_mib = resident_mib(), opening = now_ms();
  void* library = dlopen(g_arguments[1], RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return fail("dlopen", dlerror());
  using Get = const dynamiccl_brain* (*)(void);
  const dynamiccl_brain* brain = reinterpret_cast<Get>(dlsym(library, DYNAMICCL_BRAIN_SYMBOL))();
  const dynamiccl_brain_config config = {g_arguments[2], g_arguments[3], nullptr,
                                         std::atoi(g_arguments[4]), std::atoi(g_arguments[5])};
  void* state = nullptr;
  if (brain->open(&config, &state, reason, sizeof reason) != 0) return fail("open", reason);
  const double open_ms = now_ms() - opening, after_mib = resident_mib();

  std::uint8_t table[DYNAMICCL_TABLE_BYTES];
  std::size_t bytes = 0;
  dynamiccl_history history = {};
  const auto decide = [&] {
    return brain->decide(state, &history, table, sizeof table, &bytes, reason, sizeof reason);
  };
  if (decide() != 0) return fail("decide", reason);
  const int first_bin = dynamiccl::read_int32(table + 24);
  const int num_bins = dynamiccl::read_int32(table + 28);
  std::mt19937_64 random(1);
  std::vector<double> step_ms;
  for (int step = 0; step < kSteps; ++step) {
    const std::vector<dynamiccl_task> tasks = warm_tasks(first_bin, num_bins, &random);
    history.tasks = tasks.data();
    history.num_tasks = static_cast<std::int32_t>(tasks.size());
    const double start = now_ms();
    if (decide() != 0) return fail("decide", reason);
    step_ms.push_back(now_ms() - start);
  }
  brain->close(state);
  const double first_ms = step_ms[0];
  std::sort(step_ms.begin(), step_ms.end());
  std::printf(
      "{\"policy_step_ms\": %.3f, \"policy_step_p99_ms\": %.3f, \"policy_first_step_ms\": %.3f, "
      "\"policy_task_keys\": %d, \"policy_open_ms\": %.1f, \"policy_rss_mib\": %.1f}\n",
      step_ms[kSteps / 2], step_ms[kSteps - 1], first_ms, 5 * num_bins, open_ms,
      after_mib - before_mib);
  return 0;
}

void* run(void* result) {
  *static_cast<int*>(result) = measure();
  return nullptr;
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 6) return 2;
  g_arguments = arguments;
  int result = 1;
  pthread_t thread;
  if (!dynamiccl::start_thread(run, &result, "brain", &thread)) return 3;
  dynamiccl::join_thread(thread);
  return result;
}
