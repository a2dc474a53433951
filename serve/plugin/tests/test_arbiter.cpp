// The arbiter's two processes where a supervisor starts them again, no thread can be had, a rank's
// child has its connection, or the job ends. What else it answers: tests/serve/test_arbiter.py.
//
//   test_arbiter ARBITER
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "agree/caller.h"
#include "arbiter/guard.h"
#include "platform/system.h"
#include "tests/check.h"
#include "tests/table_file.h"

using namespace dynamiccl;

namespace {

constexpr std::uint64_t kJobOfTest = 0xa1b2c3;
const char* g_program = nullptr;
Key g_key;  // drawn, so that it marks the arbiters of this test
char g_key_text[33];

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

/// A process that waits for its end, with all descriptors that are open.
pid_t idle() {
  const pid_t pid = fork();
  if (pid == 0) pause();
  return pid;
}

void end(pid_t pid) {
  kill(pid, SIGKILL);
  waitpid(pid, nullptr, 0);
}

/// Processes of the arbiter: the keeper, and after it the worker, as far as they live.
std::vector<pid_t> processes() {
  std::map<pid_t, pid_t> parents;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    const std::string folder = entry.path();
    if (text_of(folder + "/cmdline").find(g_program) != 0) continue;
    if (text_of(folder + "/environ").find(g_key_text) == std::string::npos) continue;
    const std::string line = text_of(folder + "/stat");
    std::istringstream words(line.substr(line.rfind(')') + 1));
    char state = 'Z';
    pid_t parent = 0;
    words >> state >> parent;
    if (state != 'Z') parents[std::stoi(entry.path().filename())] = parent;
  }
  std::vector<pid_t> in_order;
  for (const auto& [pid, parent] : parents) {
    in_order.insert(parents.count(parent) != 0 ? in_order.end() : in_order.begin(), pid);
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
  Verdict verdict;
  std::string reason;
};
using Change = std::function<void(Vote*, Exchange*)>;

/// The answers of `num_ranks` ranks, threads of this process, while `meanwhile` happens.
std::vector<Answer> play(
    const Arbiter& arbiter, std::uint64_t comm, int num_ranks,
    const Change& change = [](Vote*, Exchange*) {},
    const std::function<void()>& meanwhile = [] {}) {
  std::vector<Answer> answers(static_cast<std::size_t>(num_ranks));
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < num_ranks; ++rank) {
    ranks.emplace_back([&, rank] {
      Vote vote;
      vote.num_ranks = static_cast<std::uint32_t>(num_ranks);
      vote.round = {kJobOfTest, comm, 0};
      vote.nonce = static_cast<std::uint64_t>(rank) + 1;
      vote.rank = rank;
      Exchange exchange;
      change(&vote, &exchange);
      const Limits limits = limits_of_job();
      const Verdict verdict =
          agree_by_arbiter(arbiter, vote, limits, limits.vote_ms / 2, &exchange);
      answers[static_cast<std::size_t>(rank)] = {verdict, exchange.reason};
    });
  }
  meanwhile();
  for (std::thread& rank : ranks) rank.join();
  return answers;
}

void check_all(const std::vector<Answer>& answers, Verdict verdict, const char* reason = nullptr) {
  for (const Answer& answer : answers) {
    CHECK(answer.verdict == verdict);
    if (reason == nullptr || answer.reason == reason) continue;
    std::fprintf(stderr, "said '%s', not '%s'\n", answer.reason.c_str(), reason);
    CHECK(false);
  }
}

/// Whether it comes to give tables: a worker that is new does not know whether there is a kill
/// file.
bool gives_tables(const Arbiter& arbiter) {
  static std::uint64_t comm = 1'000'000;
  return comes_true([&arbiter] { return play(arbiter, ++comm, 2)[0].verdict == Verdict::kTable; });
}

/// Starts an arbiter that ends with this process, or with another; returns its address. Reads its
/// output to the end, as a script does, on a descriptor that it was given besides, too.
Arbiter start(pid_t ends_with = getpid(), const std::string& within = "") {
  const std::string arguments = " 0 " + std::to_string(ends_with) + " 9>&1";
  std::FILE* said = popen(("exec " + within + g_program + arguments).c_str(), "r");
  int port = 0;
  CHECK(std::fscanf(said, "%d", &port) == 1);
  CHECK(std::fgetc(said) == '\n' && std::fgetc(said) == EOF);
  pclose(said);
  Arbiter arbiter;
  arbiter.key = g_key;
  CHECK(parse_address(("127.0.0.1:" + std::to_string(port)).c_str(), &arbiter));
  CHECK(gives_tables(arbiter));
  return arbiter;
}

/// Its user may have no more threads: the worker goes on without, and answers.
void check_no_threads() {
  if (geteuid() != 0) return;
  const uid_t user = 100'000 + static_cast<uid_t>(getpid());
  const auto num_threads = [](pid_t pid) {
    const std::filesystem::directory_iterator threads("/proc/" + std::to_string(pid) + "/task");
    return std::distance(begin(threads), end(threads));
  };
  start();  // to count: a sanitizer has threads of its own in each process
  const auto of_keeper = num_threads(processes()[0]), of_worker = num_threads(processes()[1]);
  stop();
  const std::string most = "prlimit --nproc=" + std::to_string(of_keeper + of_worker);
  const Arbiter arbiter =
      start(getpid(), most + " setpriv --clear-groups --reuid=" + std::to_string(user) + " ");
  std::vector<pid_t> others;  // in the places of the threads that a worker starts
  for (auto place = of_keeper; place < of_worker; ++place) {
    others.push_back(fork());
    if (others.back() == 0 && setuid(user) == 0) execlp("sleep", "sleep", "infinity", nullptr);
    const std::string name = "/proc/" + std::to_string(others.back()) + "/comm";
    CHECK(comes_true([&name] { return text_of(name) == "sleep\n"; }));
  }
  const pid_t worker = processes()[1];
  kill(worker, SIGKILL);
  CHECK(comes_true([&] {
    const std::vector<pid_t> now = processes();
    return now.size() == 2 && now[1] != worker;
  }));
  check_all(play(arbiter, 2, 2), Verdict::kAbstain,
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
  const auto leave = [](Vote* vote, Exchange* exchange) {
    if (vote->rank != 0) return;
    exchange->accepts = [](void*, const Exchange&) {
      child = idle();
      rest(100);  // the other one confirms
      return false;
    };
  };
  check_all(play(arbiter, 1, 2, leave), Verdict::kAbstain);
  CHECK(monotonic_ms() - from_ms < 2'500);  // and not the vote limit of 5 s
  end(child);
  stop();
}

/// Both processes are lost after the table was sent, and a supervisor starts the arbiter again: who
/// had not heard of the table is told nothing, since the other one has it.
void check_another_arbiter() {
  Arbiter arbiter = start();
  static std::atomic<std::uint64_t> question;
  const auto note = [](Vote*, Exchange* exchange) {
    exchange->accepts = [](void*, const Exchange& asked) {
      question = asked.proposal.question;
      return true;
    };
  };
  check_all(play(arbiter, 1, 2, note), Verdict::kTable);
  for (const bool is_its : {true, false}) {
    Vote recall;  // of one to which this was lost on the way
    recall.num_ranks = 2;
    recall.round = {kJobOfTest, 1, 0};
    recall.nonce = 1;
    recall.kind = VoteKind::kRecall;
    recall.question = question;
    recall.mac = mac_of(arbiter.key, recall);
    const int rank = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const auto* to = reinterpret_cast<const sockaddr*>(&arbiter.address);
    CHECK(connect(rank, to, arbiter.size) == 0);
    Reply reply;
    CHECK(send(rank, &recall, sizeof recall, MSG_NOSIGNAL) == sizeof recall);
    const ssize_t got = recv(rank, &reply, sizeof reply, MSG_WAITALL);
    CHECK(got == (is_its ? static_cast<ssize_t>(sizeof reply) : 0));
    CHECK(!is_its || (is_sound(arbiter.key, reply, recall) && reply.kind == ReplyKind::kTable));
    close(rank);
    stop();
    arbiter = start();
  }
  check_all(play(arbiter, 2, 3), Verdict::kTable);
  stop();
}

/// A round that has begun is ended before it ends with its process.
void check_end() {
  const pid_t rank = idle();
  const Arbiter arbiter = start(rank);
  const auto late = [](Vote* vote, Exchange*) { usleep(vote->rank == 0 ? 500'000 : 0); };
  const auto meanwhile = [rank] {
    rest(200);
    end(rank);
  };
  check_all(play(arbiter, 2, 2, late, meanwhile), Verdict::kTable);
  CHECK(comes_true([] { return processes().empty(); }));
}

/// What was withdrawn is so when it is chosen again, too, and whoever chose it is told how it went.
void check_guard() {
  Guard guard(2);
  std::uint64_t sequence = 0;
  const auto call = [&](std::uint8_t algorithm, std::uint64_t time_us, bool is_ours) {
    for (int i = 0; i < 16; ++i, ++sequence) {
      const CallTime told = {sequence / 2, 1 << 20, 1'000 * time_us, kAllReduce, algorithm,
                             kSimple,      4,       is_ours,         0,          {}};
      guard.take(told);
    }
  };
  const auto shows = [&guard](double time_us) {
    const TimedTask task = guard.tasks()[0];
    return std::all_of(task.calls.begin(), task.calls.end(),
                       [time_us](const TimedCall& each) { return each.time_us == time_us; });
  };
  const std::vector<double> noise(kNumCollectives, 0.05);
  const auto table = [](Entry entry) { return table_of(1, 2, entry, kAllReduce, 80, 1); };
  const Bytes own = table({kAuto, kAuto, 0, 0, 0});
  const Bytes tree = table({kTree, kSimple, 0, 1, 0}), ring = table({kRing, kSimple, 0, 1, 0});
  guard.begin(tree);
  call(kNVLS, 50, false);
  call(kTree, 52, true);
  CHECK(guard.withdraw_slow(noise).empty());
  for (int i = 0; i < 4; ++i) call(kTree, 60 + i, true);
  CHECK(guard.withdraw_slow(noise).find("1 choices withdrawn: collective 4") == 0);
  CHECK(guard.withdraw_slow(noise).empty());
  call(kNVLS, 50, false);
  CHECK(shows(63.0));
  guard.begin(ring);
  call(kTree, 70, true);  // told late
  call(kRing, 49, true);
  CHECK(guard.withdraw_slow(noise).empty() && shows(49.0));
  CHECK(guard.allowed(tree) == own && guard.allowed(ring) == ring && guard.num_withdrawn() == 1);
  guard.begin(tree);
  CHECK(shows(63.0));
}

}  // namespace

int main(int, char** argv) {
  g_program = argv[1];
  std::random_device draw;
  g_key = {std::uint64_t{draw()} << 32 | draw(), std::uint64_t{draw()} << 32 | draw()};
  std::snprintf(g_key_text, sizeof g_key_text, "%016" PRIx64 "%016" PRIx64, g_key.halves[0],
                g_key.halves[1]);
  setenv("DYNAMICCL_JOB", "0000000000a1b2c3", 1);
  setenv("DYNAMICCL_KEY", g_key_text, 1);
  setenv("DYNAMICCL_KILL_FILE", (std::string("/tmp/") + g_key_text).c_str(), 1);
  setenv("DYNAMICCL_TEST_LIMIT_MS", "5000", 1);
  check_guard();
  check_no_threads();
  check_forked_child();
  check_another_arbiter();
  check_end();
  return g_failures != 0;
}
