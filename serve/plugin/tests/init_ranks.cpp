// Creates communicators under a tuner as NCCL does, without the rest of NCCL: many ranks, as
// threads of a few processes, all in the tuner's `init` at once.
//
//   init_ranks LIBRARY [OPTION NUMBER]...      the options, and what they are unless given:
//     --ranks 2 --processes 1 --rounds 1
//     --late 0         ms that the last rank comes late, to the first round
//     --absent 0       so many never come
//     --kill-at -1     ms after all have met until the first process is killed
//     --grow 0         so many ranks join after the first round only
//     --at-once 0      1: a rank's rounds are all made at once, each on a thread of its own
//     --abort-at -1    creations are non-blocking, and aborted after so many ms
//     --bind 0         1: each rank is bound to one processor when it comes, as NCCL binds it
//     --own-shm 0      1: each process has a /dev/shm of its own, as in a container of its own
//
// Prints a JSON object: how many ranks got the table, abstained and failed; the time in ms from the
// last entry to the last return, of each round; the longest that one rank was in `init`, and in an
// abort, which waits for its thread; how many rounds were over before the last rank of the first
// one came; how many threads are still bound after a failure, or are no longer without one. Why a
// creation failed goes to stderr.
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/wait.h>

#include "tests/job/board.h"
#include "tests/library.h"

namespace {

constexpr int kMostRounds = 4096;

/// Shared by the processes.
struct Shared {
  pthread_barrier_t meetings[2];  // NCCL's bootstrap, of the first round and of the others
  std::atomic<std::uint64_t> last_entry_ns[kMostRounds], last_return_ns[kMostRounds];
  std::atomic<std::uint64_t> longest_ns, longest_abort_ns;
  std::atomic<int> num_begun, tables, abstained, failed, bound_wrongly;
};
Shared* g_board = nullptr;
const ncclTuner_v6_t* g_tuner = nullptr;

std::map<std::string, int> g_options = {{"--ranks", 2}, {"--processes", 1}, {"--rounds", 1},
                                        {"--late", 0},  {"--absent", 0},    {"--kill-at", -1},
                                        {"--grow", 0},  {"--at-once", 0},   {"--abort-at", -1},
                                        {"--bind", 0},  {"--own-shm", 0}};

int option(const char* name) { return g_options.at(name); }
int num_present(int round) {
  return option("--ranks") - option("--absent") - (round == 0 ? option("--grow") : 0);
}

void sleep_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

void make_communicator(int rank, int round) {
  Shared* board = g_board;
  // NCCL's bootstrap has all ranks before a tuner's init begins.
  if (option("--at-once") == 0) pthread_barrier_wait(&board->meetings[round == 0 ? 0 : 1]);
  ++board->num_begun;
  if (round == 0 && rank + 1 == option("--ranks") - option("--absent")) sleep_ms(option("--late"));
  void* context = nullptr;
  const int num_ranks = num_present(round) + option("--absent");
  ncclNvlDomainInfo_v5_t domains = {1, num_ranks, num_ranks};
  const std::uint64_t from = now_ns();
  raise_to(&board->last_entry_ns[round], from);
  ncclResult_t result = ncclSuccess;
  const auto init = [&] {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(sched_getcpu(), &set);
    if (option("--bind") != 0) sched_setaffinity(0, sizeof set, &set);
    result = g_tuner->init(&context, 0x1000U + static_cast<unsigned>(round),
                           static_cast<std::size_t>(num_ranks), 1, keep_line, &domains, nullptr);
    if (result != ncclSuccess) std::fprintf(stderr, "%s\n", t_lines.back().c_str());
    sched_getaffinity(0, sizeof set, &set);
    const bool is_bound = CPU_COUNT(&set) == 1;
    if (option("--bind") != 0 && is_bound != (result == ncclSuccess)) ++board->bound_wrongly;
  };
  if (option("--abort-at") < 0) {
    init();
  } else {
    std::thread creation(init);
    sleep_ms(option("--abort-at"));
    const std::uint64_t aborted = now_ns();
    creation.join();  // 2.30.7 `init.cc:3041`
    raise_to(&board->longest_abort_ns, now_ns() - aborted);
  }
  const std::uint64_t until = now_ns();
  raise_to(&board->last_return_ns[round], until);
  raise_to(&board->longest_ns, until - from);
  ++(result != ncclSuccess ? board->failed : context != nullptr ? board->tables : board->abstained);
  g_tuner->finalize(context);
}

void play_rank(int rank) {
  std::vector<std::thread> rounds;
  for (int round = 0; round < option("--rounds"); ++round) {
    if (round == 0 && rank >= option("--ranks") - option("--grow")) continue;
    if (option("--at-once") != 0) {
      rounds.emplace_back(make_communicator, rank, round);
    } else {
      make_communicator(rank, round);
    }
  }
  for (std::thread& round : rounds) round.join();
}

int play_process(const char* library, int process) {
  if (option("--own-shm") != 0 && (unshare(CLONE_NEWNS) != 0 ||
                                   mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
                                   mount("tmpfs", "/dev/shm", "tmpfs", 0, nullptr) != 0)) {
    std::perror("a /dev/shm of its own");
    return 1;
  }
  const Library loaded(library);
  g_tuner = loaded.at<ncclTuner_v6_t>(6);
  std::vector<std::thread> ranks;
  for (int rank = process; rank < num_present(1); rank += option("--processes")) {
    ranks.emplace_back(play_rank, rank);
  }
  for (std::thread& rank : ranks) rank.join();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  for (int i = 2; i + 1 < argc; i += 2) {
    const auto found = g_options.find(argv[i]);
    if (found == g_options.end()) {
      std::fprintf(stderr, "unknown option %s\n", argv[i]);
      return 2;
    }
    found->second = std::atoi(argv[i + 1]);
  }
  if (argc < 2 || option("--rounds") > kMostRounds) return 2;
  g_board = static_cast<Shared*>(
      mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  pthread_barrierattr_t shared;
  pthread_barrierattr_init(&shared);
  pthread_barrierattr_setpshared(&shared, PTHREAD_PROCESS_SHARED);
  for (int i = 0; i < 2; ++i) {
    pthread_barrier_init(&g_board->meetings[i], &shared, static_cast<unsigned>(num_present(i)));
  }
  std::vector<pid_t> processes;
  for (int process = 0; process < option("--processes"); ++process) {
    const pid_t pid = fork();
    if (pid == 0) std::exit(play_process(argv[1], process));
    processes.push_back(pid);
  }
  if (option("--kill-at") >= 0) {
    while (g_board->num_begun == 0) usleep(50);  // all have met by then
    sleep_ms(option("--kill-at"));
    kill(processes[0], SIGKILL);
  }
  for (const pid_t pid : processes) waitpid(pid, nullptr, 0);
  const auto ms = [](std::uint64_t ns) {  // negative where nobody returned
    return static_cast<double>(static_cast<std::int64_t>(ns)) / 1e6;
  };
  int num_before_the_late = 0;
  std::printf("{\"ms\": [");
  for (int round = 0; round < option("--rounds"); ++round) {
    const std::uint64_t until = g_board->last_return_ns[round];
    std::printf("%s%.3f", round == 0 ? "" : ", ", ms(until - g_board->last_entry_ns[round]));
    if (round > 0 && until < g_board->last_entry_ns[0]) ++num_before_the_late;
  }
  std::printf(
      "], \"tables\": %d, \"abstained\": %d, \"failed\": %d, \"longest_ms\": %.3f, "
      "\"longest_abort_ms\": %.3f, \"before_the_late\": %d, \"bound_wrongly\": %d}\n",
      g_board->tables.load(), g_board->abstained.load(), g_board->failed.load(),
      ms(g_board->longest_ns), ms(g_board->longest_abort_ns), num_before_the_late,
      g_board->bound_wrongly.load());
  return 0;
}
