// What the tuner of a job costs a rank: one getCollInfo with a table in force, memory, threads, and
// how often these wake up in a steady job.
//
//   bench_tuner LIBRARY RANKS     with the tuner's environment set; prints JSON
//
// RANKS processes make one communicator; the last one measures.
#include <dirent.h>
#include <dlfcn.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>

#include "bench/calls.h"

namespace {

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

const ncclTuner_v5_t* load(const char* path) {
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    std::fprintf(stderr, "%s\n", dlerror());
    std::exit(3);
  }
  return static_cast<const ncclTuner_v5_t*>(dlsym(library, "ncclTunerPlugin_v5"));
}

void* create(const ncclTuner_v5_t& tuner, std::size_t num_ranks) {
  void* context = nullptr;
  tuner.init(&context, 0x1234, num_ranks, 1, nullptr, nullptr, nullptr);
  return context;
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 3) return 2;
  const auto num_ranks = static_cast<std::size_t>(std::atol(arguments[2]));
  std::vector<pid_t> others;
  for (std::size_t rank = 0; rank + 1 < num_ranks; ++rank) {
    const pid_t pid = fork();
    if (pid != 0) {
      others.push_back(pid);
      continue;
    }
    const ncclTuner_v5_t* tuner = load(arguments[1]);
    void* context = create(*tuner, num_ranks);
    pause();  // a job that goes on
    return context == nullptr;
  }
  const long before_kib = private_kib();
  const ncclTuner_v5_t* tuner = load(arguments[1]);
  void* context = create(*tuner, num_ranks);
  const long after_kib = private_kib();
  int num_threads = 0;
  const std::vector<double> empty = measure(*tuner, nullptr);
  const std::vector<double> full = measure(*tuner, context);
  const long slept = other_threads_sleeps(&num_threads);
  sleep(kSteadySeconds);
  const long woken = other_threads_sleeps(&num_threads) - slept;
  for (const pid_t pid : others) {
    kill(pid, SIGTERM);
    waitpid(pid, nullptr, 0);
  }
  if (context == nullptr) return 4;
  std::printf(
      "{\"getcollinfo_p50_ns\": %.2f, \"getcollinfo_p99_ns\": %.2f, "
      "\"baseline_empty_call_p50_ns\": %.2f, \"rss_table_mib\": %.3f, \"wakeups_per_s\": %.1f, "
      "\"job_threads\": %d}\n",
      quantile(full, 0.5), quantile(full, 0.99), quantile(empty, 0.5),
      static_cast<double>(after_kib - before_kib) / 1024.0,
      static_cast<double>(woken) / kSteadySeconds, num_threads);
  return 0;
}
