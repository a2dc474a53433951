// The arbiter's two processes, and ranks that are processes: what they are told while processes are
// killed, stand still or have no descriptors left.
//
//   test_arbiter ARBITER            all of it
//   test_arbiter ARBITER 1000       so many ranks, and how long they take
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "agree/caller.h"
#include "tests/check.h"

using namespace dynamiccl;

namespace {

constexpr std::uint64_t kJobOfTest = 0xa1b2c3;
const char* g_program = nullptr;
char g_key_file[] = "/tmp/test_arbiter_key_XXXXXX";
constexpr Key kKey = {0x0706050403020100, 0x0f0e0d0c0b0a0908};

double now_ms() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::milli>(now).count();
}

void rest(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

/// Processes of the arbiter: the keeper, and after it the worker, as far as they live.
std::vector<pid_t> processes() {
  std::vector<std::pair<pid_t, pid_t>> found;  // number, parent
  DIR* proc = opendir("/proc");
  while (const dirent* entry = readdir(proc)) {
    const pid_t pid = std::atoi(entry->d_name);
    if (pid <= 0) continue;
    std::ifstream command("/proc/" + std::to_string(pid) + "/cmdline");
    std::string text((std::istreambuf_iterator<char>(command)), {});
    if (text.find(g_program) != 0 || text.find(g_key_file) == std::string::npos) continue;
    std::ifstream stat("/proc/" + std::to_string(pid) + "/stat");
    std::string line((std::istreambuf_iterator<char>(stat)), {});
    std::istringstream rest_of(line.substr(line.rfind(')') + 1));
    char state = 0;
    pid_t parent = 0;
    rest_of >> state >> parent;
    if (state != 'Z') found.emplace_back(pid, parent);
  }
  closedir(proc);
  std::vector<pid_t> in_order;
  for (const auto& [pid, parent] : found) {
    const bool is_worker = std::any_of(found.begin(), found.end(),
                                       [p = parent](const auto& one) { return one.first == p; });
    in_order.insert(is_worker ? in_order.end() : in_order.begin(), pid);
  }
  return in_order;
}

/// Starts an arbiter that ends with this process; returns its address. Reads its output to the end,
/// as a script does.
ArbiterAddress start(const char* limits = "") {
  char line[512];
  // `exec`: the arbiter's parent is the shell that popen starts, which must outlive it.
  int ends[2];
  if (pipe(ends) != 0) std::abort();
  if (fork() == 0) {
    dup2(ends[1], 1);
    close(ends[0]);
    close(ends[1]);
    char job[32];
    std::snprintf(job, sizeof job, "%" PRIx64, kJobOfTest);
    if (*limits != '\0') {
      const auto number = static_cast<rlim_t>(std::atoi(limits));
      const rlimit files = {number, number};
      setrlimit(RLIMIT_NOFILE, &files);
    }
    execl(g_program, g_program, job, g_key_file, static_cast<char*>(nullptr));
    _exit(127);
  }
  close(ends[1]);
  std::size_t size = 0;
  for (ssize_t got; (got = read(ends[0], line + size, sizeof line - size)) > 0;) {
    size += static_cast<std::size_t>(got);
  }
  close(ends[0]);
  line[size] = '\0';
  wait(nullptr);
  ArbiterAddress address;
  CHECK(parse_address(("127.0.0.1:" + std::to_string(std::atoi(line))).c_str(), &address));
  return address;
}

void stop() {
  for (int i = 0; i < 200 && !processes().empty(); ++i) {
    for (const pid_t pid : processes()) kill(pid, SIGKILL);
    rest(5);
  }
}

struct Answer {
  Verdict verdict = Verdict::kOpen;
  double began_ms = 0;
  double ended_ms = 0;
  char reason[164] = "";
};

void nothing(Vote*, Key*) {}

/// The answers of `num_ranks` processes, while `meanwhile` happens.
std::vector<Answer> play(
    const ArbiterAddress& address, std::uint64_t comm, int num_ranks,
    const std::function<void(Vote*, Key*)>& change = nothing,
    const std::function<void()>& meanwhile = [] {}) {
  std::vector<int> ends;
  for (int rank = 0; rank < num_ranks; ++rank) {
    int ends_of[2];
    if (pipe(ends_of) != 0) std::abort();
    if (fork() == 0) {
      Vote vote;
      Key key = kKey;
      vote.num_ranks = static_cast<std::uint32_t>(num_ranks);
      vote.round = {kJobOfTest, comm, 0};
      vote.nonce = static_cast<std::uint64_t>(getpid());
      vote.rank = rank;
      change(&vote, &key);
      const Limits limits = limits_of_job();
      Answer answer;
      Reply reply;
      bool found = false;
      answer.began_ms = now_ms();
      answer.verdict =
          agree_by_arbiter(address, key, vote, limits, limits.vote_ms / 2, &reply, &found);
      answer.ended_ms = now_ms();
      std::memcpy(answer.reason, reply.reason, sizeof reply.reason);
      _exit(write(ends_of[1], &answer, sizeof answer) == sizeof answer ? 0 : 1);
    }
    close(ends_of[1]);
    ends.push_back(ends_of[0]);
  }
  meanwhile();
  std::vector<Answer> answers;
  for (const int end : ends) {
    Answer answer;
    if (read(end, &answer, sizeof answer) == sizeof answer) answers.push_back(answer);
    close(end);
  }
  while (wait(nullptr) > 0) {
  }
  return answers;
}

void check_all(const std::vector<Answer>& answers, std::size_t count, Verdict verdict,
               const char* reason = nullptr) {
  CHECK(answers.size() == count);
  for (const Answer& answer : answers) {
    CHECK(answer.verdict == verdict);
    if (reason == nullptr || std::strcmp(answer.reason, reason) == 0) continue;
    std::fprintf(stderr, "said '%s', not '%s'\n", answer.reason, reason);
    CHECK(false);
  }
}

/// Never table beside abstain, and nobody fails.
void check_alike(const std::vector<Answer>& answers) {
  for (const Answer& answer : answers) {
    CHECK(answer.verdict == answers[0].verdict);
    CHECK(answer.verdict == Verdict::kTable || answer.verdict == Verdict::kAbstain);
  }
}

void check_answers() {
  const ArbiterAddress address = start();
  check_all(play(address, 1, 8), 8, Verdict::kTable);
  check_all(play(address, 1, 8), 8, Verdict::kAbstain,
            "a communicator of this id has its table already");
  const auto differs = [](Vote* vote, Key*) { vote->fields[2] = vote->rank == 3 ? 9 : 8; };
  check_all(play(address, 2, 5, differs), 5, Verdict::kAbstain);
  const auto has_problem = [](Vote* vote, Key*) {
    if (vote->rank == 1) std::strcpy(vote->problem, "no table");
  };
  check_all(play(address, 3, 3, has_problem), 3, Verdict::kAbstain, "rank 1: no table");
  // Who lacks the key can make us abstain, and is told nothing.
  const auto lacks_key = [](Vote* vote, Key* key) { key->low += vote->rank == 0; };
  check_all(play(address, 4, 3, lacks_key), 3, Verdict::kAbstain);
  const auto of_other_job = [](Vote* vote, Key*) { ++vote->round.job; };
  check_all(play(address, 5, 2, of_other_job), 2, Verdict::kAbstain);
  // One never comes.
  const auto dies = [](Vote* vote, Key*) {
    if (vote->rank == 2) raise(SIGKILL);
  };
  check_all(play(address, 6, 3, dies), 2, Verdict::kAbstain, "2 of 3 ranks voted in time");
  // The keeper is killed: the worker answers all the same.
  kill(processes()[0], SIGKILL);
  check_all(play(address, 7, 4), 4, Verdict::kTable);
  stop();
  // Nobody listens.
  check_all(play(address, 8, 2), 2, Verdict::kAbstain);
}

/// Kills the worker at a random moment, or lets it stand still for a while.
void disturb(int rounds) {
  const ArbiterAddress address = start();
  std::srand(1);
  int tables = 0;
  for (int i = 0; i < rounds; ++i) {
    const int delay_us = std::rand() % 4'000;
    const bool is_stop = i % 4 == 0;
    const auto answers =
        play(address, static_cast<std::uint64_t>(100 + i), 4, nothing, [delay_us, is_stop] {
          usleep(static_cast<useconds_t>(delay_us));
          const auto found = processes();
          if (found.size() < 2) return;
          kill(found[1], is_stop ? SIGSTOP : SIGKILL);
          if (!is_stop) return;
          rest(400);
          kill(found[1], SIGCONT);
        });
    CHECK(answers.size() == 4);
    check_alike(answers);
    tables += answers[0].verdict == Verdict::kTable;
  }
  std::printf("%d rounds, %d of them with a table\n", rounds, tables);
  CHECK(tables > 0 && tables < rounds);
  stop();
}

void check_few_descriptors() {
  const ArbiterAddress address = start("16");
  for (std::uint64_t comm = 1; comm < 4; ++comm) check_alike(play(address, comm, 24));
  check_all(play(address, 9, 4), 4, Verdict::kTable);
  stop();
}

/// It ends soon after the process that started it.
void check_end() {
  const pid_t launcher = fork();
  if (launcher == 0) {
    start();
    _exit(0);
  }
  waitpid(launcher, nullptr, 0);
  for (int i = 0; i < 100 && !processes().empty(); ++i) rest(50);
  CHECK(processes().empty());
  stop();
}

void measure(int num_ranks, int rounds) {
  const ArbiterAddress address = start();
  std::vector<double> took_ms;
  for (int i = 0; i < rounds; ++i) {
    const auto answers = play(address, static_cast<std::uint64_t>(1'000 + i), num_ranks);
    check_all(answers, static_cast<std::size_t>(num_ranks), Verdict::kTable);
    double last_in = 0, last_out = 0;
    for (const Answer& answer : answers) {
      last_in = std::max(last_in, answer.began_ms);
      last_out = std::max(last_out, answer.ended_ms);
    }
    took_ms.push_back(last_out - last_in);
  }
  std::sort(took_ms.begin(), took_ms.end());
  std::printf("%d ranks: %.1f ms\n", num_ranks, took_ms[took_ms.size() / 2]);
  stop();
}

}  // namespace

int main(int argc, char** argv) {
  g_program = argv[1];
  const int file = mkstemp(g_key_file);
  CHECK(write(file, &kKey, sizeof kKey) == sizeof kKey);
  close(file);
  if (argc > 2 && std::atoi(argv[2]) > 1) {
    measure(std::atoi(argv[2]), 3);
  } else {
    setenv("DYNAMICCL_TEST_LIMIT_MS", "1000", 1);
    check_answers();
    disturb(60);
    check_few_descriptors();
    check_end();
    measure(16, 20);
  }
  unlink(g_key_file);
  return g_failures;
}
