// The word in /dev/shm, by processes as ranks: everybody gets the same answer whoever differs, does
// not come, is killed or cannot open the file.
//
//   test_word            all of it, and how long 8 ranks take
//   test_word 2000       so many ranks, and how long they take
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "agree/word.h"
#include "tests/check.h"

using namespace dynamiccl;

namespace {

double now_ms() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::milli>(now).count();
}

/// What a rank says when it is done.
struct Answer {
  bool has_table = false;
  bool in_vain = false;
  double began_ms = 0;
  double ended_ms = 0;
  char reason[120] = "";
};

constexpr std::uint64_t kLimitMs = 300;

Vote vote_of(std::uint64_t comm, int rank, int num_ranks) {
  Vote vote;
  vote.num_ranks = static_cast<std::uint32_t>(num_ranks);
  vote.round = {static_cast<std::uint64_t>(getppid()), comm, 0};
  vote.rank = rank;
  std::fill(std::begin(vote.fields), std::end(vote.fields), 7U);
  return vote;
}

std::string name_of(std::uint64_t comm) {
  char name[96];
  std::snprintf(name, sizeof name, "/dev/shm/dynamiccl-%u-%016llx-%016llx",
                static_cast<unsigned>(geteuid()), static_cast<unsigned long long>(getpid()),
                static_cast<unsigned long long>(comm));
  return name;
}

/// The answers of `num_ranks` processes, those that were killed without one; `change` is called in
/// each before it votes.
std::vector<Answer> play(std::uint64_t comm, int num_ranks,
                         const std::function<void(Vote*)>& change, std::uint64_t limit_ms) {
  std::vector<int> ends;
  for (int rank = 0; rank < num_ranks; ++rank) {
    int ends_of[2];
    if (pipe(ends_of) != 0) std::abort();
    if (fork() == 0) {
      Vote vote = vote_of(comm, rank, num_ranks);
      change(&vote);
      Answer answer;
      answer.began_ms = now_ms();
      answer.has_table =
          agree_by_word(vote, limit_ms, &answer.in_vain, answer.reason, sizeof answer.reason);
      answer.ended_ms = now_ms();
      _exit(write(ends_of[1], &answer, sizeof answer) == sizeof answer ? 0 : 1);
    }
    close(ends_of[1]);
    ends.push_back(ends_of[0]);
  }
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

void check_all(const std::vector<Answer>& answers, std::size_t count, bool has_table,
               const char* reason = nullptr) {
  CHECK(answers.size() == count);
  for (const Answer& answer : answers) {
    CHECK(answer.has_table == has_table);
    if (reason != nullptr && std::strcmp(answer.reason, reason) != 0) {
      std::fprintf(stderr, "said '%s', not '%s'\n", answer.reason, reason);
      CHECK(false);
    }
  }
}

bool is_there(const std::string& name) { return access(name.c_str(), F_OK) == 0; }

void nothing(Vote*) {}

void check_answers() {
  check_all(play(1, 8, nothing, 10'000), 8, true);
  CHECK(!is_there(name_of(1)));

  const auto differs = [](Vote* vote) { vote->fields[6] += vote->rank == 3; };
  const auto differs_of_five = [&differs](Vote* vote) {
    vote->num_ranks = 5;
    differs(vote);
  };
  const auto answers = play(2, 4, differs_of_five, 10'000);
  check_all(answers, 4, false);
  for (const Answer& answer : answers) {
    CHECK(std::strstr(answer.reason, "differs from the first in machine") != nullptr);
    CHECK(!answer.in_vain);
  }
  // The word stays for the fifth, which comes late: it abstains at once, and takes the word away.
  CHECK(is_there(name_of(2)));
  const double late_ms = now_ms();
  check_all(play(2, 1, [](Vote* vote) { vote->num_ranks = 5; }, 10'000), 1, false);
  CHECK(now_ms() - late_ms < 5'000);
  CHECK(!is_there(name_of(2)));

  const auto has_problem = [](Vote* vote) {
    if (vote->rank == 1) std::strcpy(vote->problem, "no table");
  };
  check_all(play(3, 3, has_problem, 10'000), 3, false,
            "rank 1 cannot use a table: its own line says why");
  CHECK(!is_there(name_of(3)));

  // One does not come: it is killed before it votes.
  const auto dies = [](Vote* vote) {
    if (vote->rank == 2) raise(SIGKILL);
  };
  const auto left = play(4, 3, dies, kLimitMs);
  check_all(left, 2, false, "not all 3 ranks came in time");
  for (const Answer& answer : left) {
    CHECK(answer.in_vain);
    const double took_ms = answer.ended_ms - answer.began_ms;
    CHECK(took_ms > kLimitMs - 50 && took_ms < kLimitMs + 5'000);
  }
  unlink(name_of(4).c_str());

  // One cannot open the file: without descriptors, or where the disk is full.
  const auto has_no_file = [](Vote* vote) {
    const rlimit none = {0, 0};
    if (vote->rank == 0) setrlimit(RLIMIT_NOFILE, &none);
  };
  check_all(play(5, 3, has_no_file, kLimitMs), 3, false);
  unlink(name_of(5).c_str());
  const auto is_full = [](Vote*) {
    const rlimit none = {0, 0};
    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &none);
  };
  check_all(play(6, 2, is_full, kLimitMs), 2, false,
            "its word in /dev/shm cannot be used: File too large");
  unlink(name_of(6).c_str());

  // Somebody put a link there, to a file of the user's.
  char file[] = "/tmp/test_word_XXXXXX";
  close(mkstemp(file));
  CHECK(symlink(file, name_of(7).c_str()) == 0);
  check_all(play(7, 2, nothing, kLimitMs), 2, false);
  struct stat status = {};
  CHECK(stat(file, &status) == 0 && status.st_size == 0);
  unlink(file);
  unlink(name_of(7).c_str());
}

/// Kills a rank at a random moment, again and again: never table beside abstain.
void kill_at_random() {
  std::srand(1);
  for (int i = 0; i < 60; ++i) {
    const auto delay_us = static_cast<unsigned>(std::rand() % 2'000);
    const auto dies = [delay_us](Vote* vote) {
      if (vote->rank != 1) return;
      if (fork() == 0) {
        usleep(delay_us);
        kill(getppid(), SIGKILL);
        _exit(0);
      }
    };
    const auto comm = static_cast<std::uint64_t>(100 + i);
    const auto answers = play(comm, 4, dies, kLimitMs);
    CHECK(answers.size() >= 3);
    for (const Answer& answer : answers) CHECK(answer.has_table == answers[0].has_table);
    unlink(name_of(comm).c_str());
  }
}

/// The median, over rounds, of the time from the last rank in to the last rank out.
void measure(int num_ranks, int rounds) {
  std::vector<double> took_ms;
  for (int i = 0; i < rounds; ++i) {
    const auto answers = play(static_cast<std::uint64_t>(1'000 + i), num_ranks, nothing, 60'000);
    check_all(answers, static_cast<std::size_t>(num_ranks), true);
    double last_in = 0, last_out = 0;
    for (const Answer& answer : answers) {
      last_in = std::max(last_in, answer.began_ms);
      last_out = std::max(last_out, answer.ended_ms);
    }
    took_ms.push_back(last_out - last_in);
  }
  std::sort(took_ms.begin(), took_ms.end());
  std::printf("%d ranks: %.3f ms\n", num_ranks, took_ms[took_ms.size() / 2]);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1 && std::atoi(argv[1]) > 1) {
    measure(std::atoi(argv[1]), 3);
    return g_failures;
  }
  check_answers();
  kill_at_random();
  measure(8, 50);
  return g_failures;
}
