// Creates communicators under a tuner as NCCL does, without the rest of NCCL: many ranks, as
// threads of a few processes, all in the tuner's `init` at once.
//
//   init_ranks LIBRARY --ranks 2000 [--processes 4] [--rounds 1] [--late MS] [--absent 1]
//              [--kill-at MS] [--grow 2] [--at-once 1] [--abort-at MS] [--bind 1] [--own-shm 1]
//
// abort-at: creations are non-blocking, and each rank aborts its own after so long, which waits for
// its thread. grow: so many ranks join after the first round only. at-once: a rank's rounds are all
// made at once, each on a thread of its own, and only in the first is anybody late. kill-at: the
// first process is killed so long after all have met. bind: each rank is bound to one processor
// when it comes, as NCCL binds it. own-shm: each process has a /dev/shm of its own, as in a
// container of its own.
//
// Prints a JSON object: how many ranks got the table, abstained and failed; the time in ms from the
// last entry to the last return, of each round; the longest that one rank was in `init`, and in an
// abort; how many rounds were over before the last rank of the first one came; how many threads are
// still bound after a failure, or are no longer without one. What it warns of goes to stderr.
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "nccl/tuner_abi.h"

namespace {

constexpr int kMostRounds = 4096;

struct Board {
  pthread_barrier_t first, later;  // NCCL's bootstrap, of the first round and of the others
  std::atomic<std::int64_t> last_entry_ns[kMostRounds], last_return_ns[kMostRounds];
  std::atomic<std::int64_t> longest_ns, longest_abort_ns;
  std::atomic<int> num_begun, tables, abstained, failed, bound_wrongly;
};

struct Options {
  int ranks = 2, processes = 1, rounds = 1, late_ms = 0, absent = 0, kill_at_ms = -1, grow = 0,
      at_once = 0, abort_at_ms = -1, bind = 0, own_shm = 0;

  bool takes_part(int rank, int round) const {
    if (rank >= ranks - absent) return false;
    return round > 0 || rank < ranks - grow;
  }
  /// What NCCL says there are: an absent rank is one of them.
  int num_ranks(int round) const {
    int count = absent;
    for (int rank = 0; rank < ranks; ++rank) count += takes_part(rank, round) ? 1 : 0;
    return count;
  }
};

/// As ncclDebugLog lies in NCCL.
void warn(ncclDebugLogLevel level, unsigned long, const char*, int, const char* format, ...) {
  if (level > NCCL_LOG_WARN) return;
  va_list arguments;
  va_start(arguments, format);
  std::vfprintf(stderr, format, arguments);
  va_end(arguments);
  std::fputc('\n', stderr);
}

bool is_bound() {
  cpu_set_t allowed;
  return sched_getaffinity(0, sizeof allowed, &allowed) == 0 && CPU_COUNT(&allowed) == 1;
}

std::int64_t now_ns() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

void raise_to(std::atomic<std::int64_t>* most, std::int64_t value) {
  std::int64_t seen = most->load();
  while (seen < value && !most->compare_exchange_weak(seen, value)) {
  }
}

void make_communicator(const ncclTuner_v6_t* tuner, const Options& options, int rank, int round,
                       Board* board) {
  // NCCL's bootstrap has all ranks before a tuner's init begins.
  if (options.at_once == 0) pthread_barrier_wait(round == 0 ? &board->first : &board->later);
  ++board->num_begun;
  if (rank == options.ranks - options.absent - 1 && round == 0 && options.late_ms > 0) {
    std::this_thread::sleep_for(std::chrono::milliseconds(options.late_ms));
  }
  void* context = nullptr;
  const int num_ranks = options.num_ranks(round);
  ncclNvlDomainInfo_v5_t domains = {1, num_ranks, num_ranks};
  const std::int64_t from = now_ns();
  raise_to(&board->last_entry_ns[round], from);
  ncclResult_t result = ncclSuccess;
  const auto init = [&] {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    if (options.bind != 0) sched_setaffinity(0, sizeof one, &one);
    result = tuner->init(&context, 0x1000U + static_cast<unsigned>(round),
                         static_cast<std::size_t>(num_ranks), 1, warn, &domains, nullptr);
    if (options.bind != 0 && is_bound() != (result == ncclSuccess)) ++board->bound_wrongly;
  };
  if (options.abort_at_ms < 0) {
    init();
  } else {
    std::thread creation(init);
    std::this_thread::sleep_for(std::chrono::milliseconds(options.abort_at_ms));
    const std::int64_t aborted = now_ns();
    creation.join();  // 2.30.7 `init.cc:3041`
    raise_to(&board->longest_abort_ns, now_ns() - aborted);
  }
  const std::int64_t until = now_ns();
  raise_to(&board->last_return_ns[round], until);
  raise_to(&board->longest_ns, until - from);
  ++(result != ncclSuccess ? board->failed : context != nullptr ? board->tables : board->abstained);
  tuner->finalize(context);
}

void play_rank(const ncclTuner_v6_t* tuner, const Options& options, int rank, Board* board) {
  std::vector<std::thread> rounds;
  for (int round = 0; round < options.rounds; ++round) {
    if (!options.takes_part(rank, round)) continue;
    if (options.at_once != 0) {
      rounds.emplace_back(make_communicator, tuner, options, rank, round, board);
    } else {
      make_communicator(tuner, options, rank, round, board);
    }
  }
  for (std::thread& round : rounds) round.join();
}

int play_process(const char* library, const Options& options, int process, Board* board) {
  if (options.own_shm != 0 && (unshare(CLONE_NEWNS) != 0 ||
                               mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
                               mount("tmpfs", "/dev/shm", "tmpfs", 0, nullptr) != 0)) {
    std::perror("a /dev/shm of its own");
    return 1;
  }
  void* loaded = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (loaded == nullptr) {
    std::fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  const auto* tuner = static_cast<const ncclTuner_v6_t*>(dlsym(loaded, "ncclTunerPlugin_v6"));
  std::vector<std::thread> ranks;
  for (int rank = process; rank < options.ranks - options.absent; rank += options.processes) {
    ranks.emplace_back(play_rank, tuner, options, rank, board);
  }
  for (std::thread& rank : ranks) rank.join();
  return 0;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int ncclGetVersion(int* version) {
  *version = 23007;
  return 0;
}

int main(int argc, char** argv) {
  Options options;
  const std::map<std::string, int*> known = {{"--ranks", &options.ranks},
                                             {"--processes", &options.processes},
                                             {"--rounds", &options.rounds},
                                             {"--late", &options.late_ms},
                                             {"--absent", &options.absent},
                                             {"--grow", &options.grow},
                                             {"--bind", &options.bind},
                                             {"--at-once", &options.at_once},
                                             {"--abort-at", &options.abort_at_ms},
                                             {"--kill-at", &options.kill_at_ms},
                                             {"--own-shm", &options.own_shm}};
  for (int i = 2; i + 1 < argc; i += 2) {
    const auto found = known.find(argv[i]);
    if (found == known.end()) {
      std::fprintf(stderr, "unknown option %s\n", argv[i]);
      return 2;
    }
    *found->second = std::atoi(argv[i + 1]);
  }
  if (argc < 2 || options.rounds > kMostRounds) return 2;
  auto* board = static_cast<Board*>(
      mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  pthread_barrierattr_t shared;
  pthread_barrierattr_init(&shared);
  pthread_barrierattr_setpshared(&shared, PTHREAD_PROCESS_SHARED);
  const auto init = [&](pthread_barrier_t* barrier, int round) {
    const int count = options.num_ranks(round) - options.absent;
    pthread_barrier_init(barrier, &shared, static_cast<unsigned>(count));
  };
  init(&board->first, 0);
  init(&board->later, 1);
  std::vector<pid_t> processes;
  for (int process = 0; process < options.processes; ++process) {
    const pid_t pid = fork();
    if (pid == 0) std::exit(play_process(argv[1], options, process, board));
    processes.push_back(pid);
  }
  if (options.kill_at_ms >= 0) {
    while (board->num_begun == 0) usleep(50);  // all have met by then
    std::this_thread::sleep_for(std::chrono::milliseconds(options.kill_at_ms));
    kill(processes[0], SIGKILL);
  }
  for (const pid_t pid : processes) waitpid(pid, nullptr, 0);
  std::printf(
      "{\"tables\": %d, \"abstained\": %d, \"failed\": %d, \"longest_ms\": %.3f, "
      "\"longest_abort_ms\": %.3f, \"ms\": [",
      board->tables.load(), board->abstained.load(), board->failed.load(),
      static_cast<double>(board->longest_ns.load()) / 1e6,
      static_cast<double>(board->longest_abort_ns.load()) / 1e6);
  for (int round = 0; round < options.rounds; ++round) {
    const std::int64_t took = board->last_return_ns[round] - board->last_entry_ns[round];
    std::printf("%s%.3f", round == 0 ? "" : ", ", static_cast<double>(took) / 1e6);
  }
  int before = 0;
  for (int round = 1; round < options.rounds; ++round) {
    before += board->last_return_ns[round] < board->last_entry_ns[0] ? 1 : 0;
  }
  std::printf("], \"before_the_late\": %d, \"bound_wrongly\": %d}\n", before,
              board->bound_wrongly.load());
  return 0;
}
