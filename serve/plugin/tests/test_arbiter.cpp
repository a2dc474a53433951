// The arbiter's two processes where a supervisor starts them again, no thread can be had, a rank's
// child has its connection, or the job ends. What else it answers: tests/serve/test_arbiter.py.
//
//   test_arbiter ARBITER
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "agree/caller.h"
#include "agree/told.h"
#include "platform/clock.h"
#include "tests/check.h"

using namespace dynamiccl;

namespace {

constexpr std::uint64_t kJobOfTest = 0xa1b2c3;
constexpr char kJobText[] = "0000000000a1b2c3";
const char* g_program = nullptr;
Key g_key;  // drawn, so that it marks the arbiters of this test
char g_key_text[33];
char g_kill_file[] = "/tmp/test_arbiter_kill_XXXXXX";

void rest(std::uint64_t ms) { sleep_ns(ms * 1'000'000); }

/// Within 20 s.
bool comes_true(const std::function<bool()>& condition) {
  for (int i = 0; i < 1'000; ++i, rest(20)) {
    if (condition()) return true;
  }
  return false;
}

/// Empty where it cannot be read, as of a process that has just ended.
std::string text_of(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

/// A process that waits for its end.
pid_t idle(uid_t user = geteuid()) {
  const pid_t pid = fork();
  if (pid == 0 && setuid(user) == 0) pause();
  if (pid == 0) _exit(0);
  return pid;
}

void end(pid_t pid) {
  kill(pid, SIGKILL);
  waitpid(pid, nullptr, 0);
}

/// Processes of the arbiter: the keeper, and after it the worker, as far as they live.
std::vector<pid_t> processes() {
  std::vector<std::pair<pid_t, pid_t>> found;  // number, parent
  DIR* proc = opendir("/proc");
  while (const dirent* entry = readdir(proc)) {
    const pid_t pid = std::atoi(entry->d_name);
    if (pid <= 0) continue;
    const std::string folder = "/proc/" + std::to_string(pid);
    if (text_of(folder + "/cmdline").find(g_program) != 0) continue;
    if (text_of(folder + "/environ").find(g_key_text) == std::string::npos) continue;
    const std::string line = text_of(folder + "/stat");
    if (line.empty()) continue;
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

void stop() {
  CHECK(comes_true([] {
    for (const pid_t pid : processes()) kill(pid, SIGKILL);
    return processes().empty();
  }));
}

struct Answer {
  Verdict verdict = Verdict::kOpen;
  char reason[164] = "";
};

/// The answers of `num_ranks` processes, while `meanwhile` happens.
std::vector<Answer> play(
    const Arbiter& arbiter, std::uint64_t comm, int num_ranks,
    const std::function<void(Vote*)>& change = [](Vote*) {},
    const std::function<void()>& meanwhile = [] {}) {
  std::vector<int> ends;
  std::vector<pid_t> ranks;
  for (int rank = 0; rank < num_ranks; ++rank) {
    int ends_of[2];
    if (pipe(ends_of) != 0) std::abort();
    ranks.push_back(fork());
    if (ranks.back() == 0) {
      Vote vote;
      vote.num_ranks = static_cast<std::uint32_t>(num_ranks);
      vote.round = {kJobOfTest, comm, 0};
      vote.nonce = static_cast<std::uint64_t>(getpid());
      vote.rank = rank;
      change(&vote);
      const Limits limits = limits_of_job();
      Answer answer;
      Exchange exchange;
      answer.verdict = agree_by_arbiter(arbiter, vote, limits, limits.vote_ms / 2, &exchange);
      std::memcpy(answer.reason, exchange.reason, sizeof exchange.reason);
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
  for (const pid_t rank : ranks) waitpid(rank, nullptr, 0);
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

/// Whether it comes to give tables: a worker that is new does not know whether there is a kill
/// file.
bool gives_tables(const Arbiter& arbiter) {
  static std::uint64_t comm = 1'000'000;
  return comes_true([&arbiter] { return play(arbiter, ++comm, 2)[0].verdict == Verdict::kTable; });
}

/// Starts an arbiter that ends with this process, or with some; returns its address. Reads its
/// output to the end, as a script does, on a descriptor that it was given besides, too.
Arbiter start(const std::vector<pid_t>& ends_with = {getpid()}, uid_t user = 0) {
  char line[512];
  int ends[2];
  if (pipe(ends) != 0) std::abort();
  if (fork() == 0) {
    dup2(ends[1], 1);
    dup2(ends[1], 63);
    close(ends[0]);
    close(ends[1]);
    const rlimit four = {4, 4};
    if (user != 0 && (setrlimit(RLIMIT_NPROC, &four) != 0 || setuid(user) != 0)) std::abort();
    std::vector<std::string> words = {g_program, "0"};
    for (const pid_t pid : ends_with) words.push_back(std::to_string(pid));
    std::vector<char*> arguments;
    for (std::string& word : words) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    execv(g_program, arguments.data());
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
  Arbiter arbiter;
  arbiter.key = g_key;
  CHECK(parse_address(("127.0.0.1:" + std::to_string(std::atoi(line))).c_str(), &arbiter));
  CHECK(gives_tables(arbiter));
  return arbiter;
}

/// Its user may have no more threads: the worker goes on without, and answers.
void check_no_threads() {
  if (geteuid() != 0) return;
  const uid_t user = 100'000 + static_cast<uid_t>(getpid());
  const Arbiter arbiter = start({getpid()}, user);
  const pid_t others[] = {idle(user), idle(user)};
  const auto is_theirs = [user](pid_t pid) {
    struct stat facts = {};
    return stat(("/proc/" + std::to_string(pid)).c_str(), &facts) == 0 && facts.st_uid == user;
  };
  CHECK(comes_true([&] { return is_theirs(others[0]) && is_theirs(others[1]); }));
  const pid_t worker = processes()[1];
  kill(worker, SIGKILL);
  CHECK(comes_true([&] { return processes().size() == 2 && processes()[1] != worker; }));
  check_all(play(arbiter, 2, 2), 2, Verdict::kAbstain,
            "whether a kill file is there is not known yet");
  for (const pid_t other : others) end(other);
  CHECK(gives_tables(arbiter));  // at each round it is tried again
  stop();
}

/// A rank leaves whose child has its connection too, and lives on: the other one hears of it.
void check_forked_child() {
  const Arbiter arbiter = start();
  const std::uint64_t from_ms = monotonic_ms();
  static pid_t child = 0;
  std::vector<std::thread> ranks;
  for (std::uint64_t nonce = 1; nonce <= 2; ++nonce) {
    ranks.emplace_back([&arbiter, nonce] {
      Vote vote;
      vote.num_ranks = 2;
      vote.round = {kJobOfTest, 1, 0};
      vote.nonce = nonce;
      Exchange exchange;
      exchange.accepts = [](void* is_first, const Exchange&) {
        if (is_first == nullptr) return true;
        child = fork();
        if (child == 0) pause();
        rest(100);  // the other one confirms
        return false;
      };
      exchange.user = nonce == 1 ? &child : nullptr;
      const Limits limits = limits_of_job();
      CHECK(agree_by_arbiter(arbiter, vote, limits, limits.vote_ms, &exchange) ==
            Verdict::kAbstain);
    });
  }
  for (std::thread& rank : ranks) rank.join();
  CHECK(monotonic_ms() - from_ms < 2'500);  // and not the vote limit of 5 s
  end(child);
  stop();
}

/// What an arbiter answers to this message.
Reply say(const Arbiter& arbiter, int descriptor, Vote vote) {
  vote.mac = mac_of(arbiter.key, vote);
  Reply reply;
  CHECK(send(descriptor, &vote, sizeof vote, MSG_NOSIGNAL) == sizeof vote);
  CHECK(recv(descriptor, &reply, sizeof reply, MSG_WAITALL) == sizeof reply);
  CHECK(is_sound(arbiter.key, reply, vote));
  return reply;
}

int connected(const Arbiter& arbiter) {
  const int descriptor = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const auto* to = reinterpret_cast<const sockaddr*>(&arbiter.address);
  CHECK(connect(descriptor, to, arbiter.size) == 0);
  return descriptor;
}

/// Both processes are lost after the table was sent, and a supervisor starts the arbiter again: who
/// had not heard of the table is told nothing, since the other one has it.
void check_another_arbiter() {
  Arbiter arbiter = start();
  Vote votes[2];
  int ranks[2];
  for (int i = 0; i < 2; ++i) {
    votes[i].num_ranks = 2;
    votes[i].round = {kJobOfTest, 1, 0};
    votes[i].nonce = static_cast<std::uint64_t>(i) + 1;
    ranks[i] = connected(arbiter);
  }
  std::thread first([&] { votes[0].question = say(arbiter, ranks[0], votes[0]).question; });
  votes[1].question = say(arbiter, ranks[1], votes[1]).question;
  first.join();
  votes[0].kind = votes[1].kind = VoteKind::kConfirm;
  std::thread second([&] { CHECK(say(arbiter, ranks[0], votes[0]).kind == ReplyKind::kTable); });
  CHECK(say(arbiter, ranks[1], votes[1]).kind == ReplyKind::kTable);  // which is not heard
  second.join();
  votes[1].kind = VoteKind::kRecall;
  CHECK(say(arbiter, connected(arbiter), votes[1]).kind == ReplyKind::kTable);
  stop();
  arbiter = start();
  CHECK(say(arbiter, connected(arbiter), votes[1]).kind == ReplyKind::kStranger);
  check_all(play(arbiter, 2, 3), 3, Verdict::kTable);
  stop();
}

/// Two ranks agree at a stop, and have lived for so long.
void agree_at_stop(const Arbiter& arbiter, std::uint64_t comm, std::uint64_t lived_ns) {
  std::vector<std::thread> ranks;
  for (std::uint64_t nonce = 1; nonce <= 2; ++nonce) {
    ranks.emplace_back([&arbiter, comm, lived_ns, nonce] {
      Told told;
      told.lived_ns = lived_ns;
      Vote vote;
      vote.num_ranks = 2;
      vote.round = {kJobOfTest, comm, 1};
      vote.nonce = nonce;
      vote.body_bytes = sizeof told;
      vote.body_digest = siphash(arbiter.key, &told, sizeof told);
      vote.mac = mac_of(arbiter.key, vote);
      const int rank = connected(arbiter);
      Reply reply;
      CHECK(send(rank, &vote, sizeof vote, MSG_NOSIGNAL | MSG_MORE) == sizeof vote);
      CHECK(send(rank, &told, sizeof told, MSG_NOSIGNAL) == sizeof told);
      CHECK(recv(rank, &reply, sizeof reply, MSG_WAITALL) == sizeof reply);
      vote.question = reply.question;
      vote.kind = VoteKind::kConfirm;
      vote.body_bytes = 0;
      CHECK(say(arbiter, rank, vote).kind == ReplyKind::kTable);
      close(rank);
    });
  }
  for (std::thread& rank : ranks) rank.join();
}

/// After a restart ranks have lived less long than those before them.
void check_metrics_after_restart() {
  char directory[] = "/tmp/test_arbiter_metrics_XXXXXX";
  CHECK(mkdtemp(directory) != nullptr);
  setenv("DYNAMICCL_METRICS_DIR", directory, 1);
  const Arbiter arbiter = start();
  unsetenv("DYNAMICCL_METRICS_DIR");
  agree_at_stop(arbiter, 1, 3'600'000'000'000);
  const std::string path = std::string(directory) + "/dynamiccl-" + kJobText + ".prom";
  std::uint64_t comm = 1;
  CHECK(comes_true([&] {
    agree_at_stop(arbiter, ++comm, 1'000'000'000);
    return text_of(path).find("comm=\"0000000000000002\"") != std::string::npos;
  }));
  unlink(path.c_str());
  rmdir(directory);
  stop();
}

/// It ends with the last of its processes, at once where no round is open.
void check_end() {
  const pid_t launchers[] = {idle(), idle()};
  const Arbiter arbiter = start({launchers[0], launchers[1]});
  end(launchers[0]);
  rest(1'200);
  check_all(play(arbiter, 1, 2), 2, Verdict::kTable);
  // A round that has begun is ended before that.
  const auto late = [](Vote* vote) { usleep(vote->rank == 0 ? 500'000 : 0); };
  check_all(play(arbiter, 2, 2, late,
                 [&launchers] {
                   rest(200);
                   end(launchers[1]);
                 }),
            2, Verdict::kTable);
  CHECK(comes_true([] { return processes().empty(); }));
  // So does a worker whose keeper is dead.
  const pid_t last = fork();
  if (last == 0) {
    start();
    kill(processes()[0], SIGKILL);
    _exit(0);
  }
  waitpid(last, nullptr, 0);
  CHECK(comes_true([] { return processes().empty(); }));
  stop();
}

}  // namespace

int main(int, char** argv) {
  g_program = argv[1];
  std::random_device draw;
  g_key = {std::uint64_t{draw()} << 32 | draw(), std::uint64_t{draw()} << 32 | draw()};
  std::snprintf(g_key_text, sizeof g_key_text, "%016" PRIx64 "%016" PRIx64, g_key.low, g_key.high);
  setenv("DYNAMICCL_JOB", kJobText, 1);
  setenv("DYNAMICCL_KEY", g_key_text, 1);
  close(mkstemp(g_kill_file));
  unlink(g_kill_file);
  setenv("DYNAMICCL_KILL_FILE", g_kill_file, 1);
  setenv("DYNAMICCL_TEST_LIMIT_MS", "5000", 1);
  check_no_threads();
  check_forked_child();
  check_another_arbiter();
  check_metrics_after_restart();
  check_end();
  return g_failures;
}
