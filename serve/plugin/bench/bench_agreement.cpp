// How long the ranks of a job take to agree at the start, what creating a communicator costs, and
// how much memory all that takes.
//
//   bench_agreement PLUGIN RANKS COMMUNICATORS CALLS_PER_S      prints JSON
//
// Starts RANKS processes that behave as NCCL 2.28 does: profiler's and tuner's init for each
// communicator, all ranks of it together, and then calls on all of them in turn, at the pace that
// is given, until every call is decided by the table. Nothing holds the ranks together but that
// pace. `agreed_ms` is from the moment at which the last rank calls its last init to the one at
// which the last rank's last communicator gives its first decided answer: reading the artifact,
// finding each other, poll, vote, the calls that lie between (at least 32, agreement/rules.h), and
// what is tried again when ranks were apart.
#include <dlfcn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "nccl/profiler_abi.h"
#include "nccl/tuner_abi.h"

namespace {

constexpr int kMaxRanks = 64, kMaxCommunicators = 64;
constexpr int kCells = 21;
constexpr std::uint64_t kSecond = 1'000'000'000;
constexpr std::uint64_t kLimitNs = 30 * kSecond;

struct Rank {
  std::uint64_t init_at_ns;  // when the last communicator's init was called
  std::uint64_t init_ns[kMaxCommunicators];
  std::uint64_t acted_at_ns;
  std::uint64_t acted_at_call;
  long private_kib;  // growth
};

/// Memory shared by all processes.
struct Board {
  std::atomic<int> arrived[2 + kMaxCommunicators];
  std::atomic<std::uint64_t> start_ns;
  std::atomic<int> finished;
  Rank ranks[kMaxRanks];
};

std::uint64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return kSecond * static_cast<std::uint64_t>(time.tv_sec) +
         static_cast<std::uint64_t>(time.tv_nsec);
}

void sleep_until(std::uint64_t when_ns) {
  const timespec when = {static_cast<time_t>(when_ns / kSecond),
                         static_cast<long>(when_ns % kSecond)};
  clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &when, nullptr);
}

void wait_for_all(std::atomic<int>* arrived, int num_ranks) {
  ++*arrived;
  while (*arrived < num_ranks) usleep(50);
}

/// NCCL 2.28 launches what was asked about; otherwise the next question belongs to the same group.
void launch(const ncclProfiler_v5_t* profiler, void* context) {
  ncclProfilerEventDescr_v5_t event = {};
  event.type = ncclProfileKernelLaunch;
  void* handle = nullptr;
  profiler->startEvent(context, &handle, &event);
  if (handle != nullptr) profiler->stopEvent(handle);
}

/// Private pages of this process.
long private_kib() {
  static char text[4096];
  FILE* file = std::fopen("/proc/self/smaps_rollup", "r");
  if (file == nullptr) std::exit(3);
  const std::size_t size = std::fread(text, 1, sizeof text - 1, file);
  std::fclose(file);
  text[size] = '\0';
  long sum = 0;
  for (const char* name : {"Private_Clean:", "Private_Dirty:"}) {
    const char* line = std::strstr(text, name);
    if (line == nullptr) std::exit(3);
    sum += std::atol(line + std::strlen(name));
  }
  return sum;
}

void run_rank(const char* path, int rank, int num_ranks, int num_comms, double calls_per_s,
              Board* board) {
  alarm(60);  // should another rank have died
  Rank& me = board->ranks[rank];
  static void* tuners[kMaxCommunicators];
  static void* profilers[kMaxCommunicators];
  static bool acts[kMaxCommunicators];
  static int mask = 0;
  private_kib();  // what reading costs by itself has been paid
  const long before_kib = private_kib();
  wait_for_all(&board->arrived[0], num_ranks);
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) std::exit(4);
  const auto* tuner = static_cast<const ncclTuner_v5_t*>(dlsym(library, "ncclTunerPlugin_v5"));
  const auto* profiler = static_cast<const ncclProfiler_v5_t*>(dlsym(library, "ncclProfiler_v5"));
  const auto ranks = static_cast<std::size_t>(num_ranks);
  for (int comm = 0; comm < num_comms; ++comm) {
    wait_for_all(&board->arrived[2 + comm], num_ranks);  // NCCL's own bootstrap
    const std::uint64_t comm_id = 0x1000 + static_cast<std::uint64_t>(comm);
    me.init_at_ns = now_ns();
    profiler->init(&profilers[comm], comm_id, &mask, "bench", 1, num_ranks, rank, nullptr);
    tuner->init(&tuners[comm], comm_id, ranks, 1, nullptr, nullptr, nullptr);
    me.init_ns[comm] = now_ns() - me.init_at_ns;
    if (tuners[comm] == nullptr) std::exit(5);
  }
  wait_for_all(&board->arrived[1], num_ranks);
  std::uint64_t none = 0;
  board->start_ns.compare_exchange_strong(none, now_ns());
  const std::uint64_t start_ns = board->start_ns;
  const double pause_ns = 1e9 / calls_per_s;
  int num_acting = 0;
  for (std::uint64_t call = 1; board->finished < num_ranks; ++call) {
    sleep_until(start_ns + static_cast<std::uint64_t>(pause_ns * static_cast<double>(call)));
    for (int comm = 0; comm < num_comms; ++comm) {
      float costs[kCells];
      for (float& cost : costs) cost = 10.0F;
      int num_channels = 0;
      const ncclResult_t result = tuner->getCollInfo(
          tuners[comm], 4, 1 << 20, 1, reinterpret_cast<float**>(costs), 7, 3, 0, &num_channels);
      if (result != ncclSuccess) std::exit(6);
      launch(profiler, profilers[comm]);
      bool is_decided = false;
      for (const float cost : costs) is_decided = is_decided || cost == 0.0F;
      if (!is_decided || acts[comm]) continue;
      acts[comm] = true;
      if (++num_acting < num_comms) continue;
      me.acted_at_ns = now_ns();
      me.acted_at_call = call;
      me.private_kib = private_kib() - before_kib;
      ++board->finished;
    }
    if (now_ns() - start_ns > kLimitNs) std::exit(7);
  }
  for (int comm = 0; comm < num_comms; ++comm) {
    tuner->finalize(tuners[comm]);
    profiler->finalize(profilers[comm]);
  }
}

void print(const Board& board, int num_ranks, int num_comms) {
  std::uint64_t began_ns = 0, ended_ns = 0;
  long most_kib = 0;
  for (int rank = 0; rank < num_ranks; ++rank) {
    const Rank& each = board.ranks[rank];
    if (each.init_at_ns > began_ns) began_ns = each.init_at_ns;
    if (each.acted_at_ns > ended_ns) ended_ns = each.acted_at_ns;
    if (each.private_kib > most_kib) most_kib = each.private_kib;
  }
  std::printf("{\"agreed_ms\": %.3f, \"agreed_at_call\": %llu, \"private_kib\": %ld, ",
              1e-6 * static_cast<double>(ended_ns - began_ns),
              static_cast<unsigned long long>(board.ranks[0].acted_at_call), most_kib);
  std::printf("\"worker_private_kib\": %ld, ", board.ranks[num_ranks - 1].private_kib);
  std::printf("\"init_first_us\": [");
  for (int rank = 0; rank < num_ranks; ++rank) {
    std::printf("%s%.2f", rank == 0 ? "" : ", ",
                1e-3 * static_cast<double>(board.ranks[rank].init_ns[0]));
  }
  std::printf("], \"init_us\": [");
  for (int rank = 0; rank < num_ranks; ++rank) {
    for (int comm = 1; comm < num_comms; ++comm) {
      std::printf("%s%.2f", rank == 0 && comm == 1 ? "" : ", ",
                  1e-3 * static_cast<double>(board.ranks[rank].init_ns[comm]));
    }
  }
  std::printf("]}\n");
}

}  // namespace

/// The NCCL that a tuner finds in this process (ENABLE_EXPORTS).
extern "C" __attribute__((visibility("default"))) int ncclGetVersion(int* version) {
  *version = 23007;
  return 0;
}

int main(int count, char** arguments) {
  if (count != 5) return 2;
  const int num_ranks = std::atoi(arguments[2]), num_comms = std::atoi(arguments[3]);
  if (num_ranks < 2 || num_ranks > kMaxRanks) return 2;
  if (num_comms < 1 || num_comms > kMaxCommunicators) return 2;
  void* memory =
      mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return 3;
  auto* board = static_cast<Board*>(memory);  // zeroed
  for (int rank = 0; rank < num_ranks; ++rank) {
    const pid_t child = fork();
    if (child < 0) return 3;
    if (child == 0) {
      run_rank(arguments[1], rank, num_ranks, num_comms, std::atof(arguments[4]), board);
      _exit(0);
    }
  }
  int worst = 0;
  for (int rank = 0; rank < num_ranks; ++rank) {
    int status = 0;
    wait(&status);
    const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128;
    if (code > worst) worst = code;
  }
  if (worst != 0) {
    std::fprintf(stderr, "a rank ended with %d\n", worst);
    return worst;
  }
  print(*board, num_ranks, num_comms);
  return 0;
}
