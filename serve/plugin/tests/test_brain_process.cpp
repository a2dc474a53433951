// A brain process that is slow, dead or strange costs time and nothing more. What dynamiccl-brain
// refuses of questions is in tests/serve/test_scripted_brain.py.
#include <sys/ptrace.h>

#include <cstring>

#include "arbiter/brain_thread.h"
#include "tests/check.h"
#include "tests/table_file.h"

using namespace dynamiccl;

namespace {
constexpr BrainLimits kShort = {300, 300, 0};
const Bytes kTable = table_of(1, 8, {kRing, kLL, 8, 1, 0});
const std::string kTableField = ", \"table\": \"" + hex_of_bytes(kTable) + "\"";
const BrainQuestion kQuestion = {"/it's \"an\" artifact\n", "box", 1, 8, {}, {}, 1};

void set_brain(const std::string& command) { setenv("DYNAMICCL_BRAIN", command.c_str(), 1); }

std::string printed(const std::string& text) { return "read -r q; printf '" + text + "\\n'; cat"; }

const std::string kTellingPid = "read -r q; printf '%s, \"error\": \"%s\"}\\n' \"${q%%,*}\" $$; ";

/// Why it gives no table; empty where it gives the good one.
std::string why_not(BrainProcess* brain, const BrainQuestion& question = kQuestion) {
  const BrainAnswer asked = brain->ask(question);
  if (asked.problem.empty()) return asked.table == kTable ? "" : "it keeps";
  CHECK(asked.table.empty());
  CHECK(asked.problem.rfind("brain: ", 0) == 0);
  return asked.problem.substr(std::strlen("brain: "));
}

std::string why_not(const std::string& command, BrainLimits limits = {20'000, 20'000, 0}) {
  set_brain(command);
  BrainProcess brain(limits);
  return why_not(&brain);
}

void good_and_bad_answers() {
  const std::string none = "it says something that is no answer", number = "{\"number\": 1";
  const std::string long_table(2 * kMaxFileBytes + 2, '0');
  const std::pair<std::string, std::string> cases[] = {
      {number + kTableField + "}", ""},
      {" {\"table\":\"" + hex_of_bytes(kTable) + "\" , \"number\":1.0 } ", ""},
      {number + "}", "it keeps"},
      {number + ", \"error\": \"no\\\\n\\\\u00e9\\\\u0041\xff\"}", "no??00e9?0041?"},
      {number + ", \"error\": \"\"}", "it gives no reason"},
      {"", none},
      {"GET / HTTP/1.1", none},
      {number, none},
      {number + "} {}", none},
      {number + "}\\n{}", none},
      {number + "}\\0", none},
      {number + ", \"other\": 1}", none},
      {"{\"number\": \"1\"}", none},
      {"{\"number\": 1e99}", none},
      {"{\"number\": nan}", none},
      {number + ", \"table\": \"\"}", none},
      {number + ", \"table\": \"0\"}", none},
      {number + ", \"table\": \"0g\"}", none},
      {number + ", \"table\": \"" + long_table + "\"}", none},
      {number + ", \"error\": \"x\"" + kTableField + "}", none},
      {number + ", \"error\": \"x", none},
      {number + ", \"error\": \"\\\\\"}", none},
      {"{\"number\": 2}", "it answers another question"},
  };
  for (const auto& [line, why] : cases) {
    const std::string found = why_not(printed(line));
    CHECK(found == why);
    if (found != why) std::fprintf(stderr, "%s: %s\n", line.c_str(), found.c_str());
  }
  CHECK(why_not("read -r q; printf '{\"num'; sleep 0.1; printf 'ber\": 1}\n'; cat") == "it keeps");
  CHECK(why_not("yes | tr -d '\\n'") == none);
}

void full_history() {
  BrainQuestion question = {std::string(4'096, '"'), "box", 1, 8, kTable, {}, 1};
  const TimedCall call = {(std::uint64_t{1} << 62) - 1, 1e16 / 3, 1e16 / 3, kNVLSTree, kSimple, 64};
  for (int i = 0; i < kNumCollectives * kMaxBins; ++i) {
    question.tasks.push_back({i / kMaxBins, i % kMaxBins, std::int64_t{1} << 62, {kWindow, call}});
  }
  BrainProcess brain;
  set_brain("n=$(head -n 1 | wc -c); printf '{\"number\": 1, \"error\": \"%s\"}\\n' $n; cat");
  const std::string length = why_not(&brain, question);
  CHECK(std::stoul(length) > 500'000 && std::stoul(length) < kMostLineBytes);
  BrainProcess deaf(kShort);
  set_brain("sleep 100");
  CHECK(why_not(&deaf, question) == "it does not answer in time");
}

void slow_and_dead() {
  const std::uint64_t from_ms = monotonic_ms();
  for (const char* silent : {"sleep 100", "cat > /dev/null", "printf x; sleep 100"}) {
    CHECK(why_not(silent, kShort) == "it does not answer in time");
  }
  CHECK(monotonic_ms() - from_ms < 5'000);
  const std::pair<const char*, const char*> dead[] = {
      {"exit 0", "it has ended with exit code 0"},
      {"read -r q", "it has ended with exit code 0"},
      {"kill -9 $$", "it has ended by signal 9"},
      {"/there/is/no/such/brain 2>&-", "it has ended with exit code 127"},
      {"read -r q; exec <&- >&-; sleep 100", "it has closed its output"},
  };
  for (const auto& [command, why] : dead) CHECK(why_not(command) == why);
}

void slow_start() {
  BrainProcess brain({300, 20'000, 0});
  set_brain("sleep 0.6; " + kTellingPid + "cat > /dev/null");
  CHECK(std::stoi(why_not(&brain)) > 0);
  CHECK(why_not(&brain) == "it does not answer in time");
}

bool is_gone(pid_t process) {
  for (int i = 0; i < 1'000; ++i, sleep_ns(5'000'000)) {
    if (kill(process, 0) != 0) return true;
  }
  return false;
}

/// Nothing stays that it has started.
void died_while_idle() {
  BrainProcess brain({20'000, 20'000, 100'000});
  set_brain("sleep 1000 & " + kTellingPid + "cat > /dev/null");
  for (int i = 0, before = 0; i < 3; ++i) {
    const int pid = std::stoi(why_not(&brain));
    CHECK(pid != before && (i == 0 || is_gone(-before)));
    before = pid;
    kill(pid, SIGKILL);
    siginfo_t found;
    CHECK(waitid(P_PID, static_cast<id_t>(pid), &found, WEXITED | WNOWAIT) == 0);
  }
}

/// After a failure it is not started again at once, and after the next one later still.
void pauses() {
  std::FILE* started = std::tmpfile();
  const int descriptor = fileno(started);
  set_brain("echo >> /proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(descriptor) +
            "; exit 3");
  BrainProcess brain({20'000, 20'000, 100});
  std::uint64_t from_ms = 0, asked_ms = 0;
  for (int starts = 0; starts < 4; ++starts, from_ms = asked_ms) {
    for (; lseek(descriptor, 0, SEEK_END) == starts; sleep_ns(2'000'000)) {
      asked_ms = monotonic_ms();
      CHECK(why_not(&brain) == "it has ended with exit code 3");
    }
    CHECK(lseek(descriptor, 0, SEEK_END) == starts + 1);
    CHECK(asked_ms - from_ms >= std::uint64_t{50} << starts);
  }
  std::fclose(started);
}

/// One that is killed and does not end, here since a tracer has not heard of it: no wait for it is
/// long, and there is no second one.
void does_not_end() {
  int told[2], traced[2];
  CHECK(pipe2(told, O_CLOEXEC) == 0 && pipe2(traced, O_CLOEXEC) == 0);
  const pid_t worker = fork();
  if (worker == 0) {
    set_brain(kTellingPid + "cat > /dev/null");
    BrainProcess brain({300, 20'000, 0});
    pid_t pid = std::stoi(why_not(&brain));
    CHECK(write(told[1], &pid, sizeof pid) == sizeof pid && read(traced[0], &pid, 1) == 1);
    const std::uint64_t from_ms = monotonic_ms();
    CHECK(why_not(&brain) == "it does not answer in time");
    CHECK(why_not(&brain) == "the one before does not end");
    CHECK(monotonic_ms() - from_ms < 10'000);
    CHECK(write(told[1], &pid, 1) == 1 && read(traced[0], &pid, 1) == 1);
    CHECK(std::stoi(why_not(&brain)) > 0);
    _exit(g_failures != 0);
  }
  close(told[1]);  // else a read would wait for ever, should the worker end early
  pid_t pid = 0;
  int status = 1;
  CHECK(read(told[0], &pid, sizeof pid) == sizeof pid);
  CHECK(ptrace(PTRACE_SEIZE, pid, nullptr, nullptr) == 0);
  CHECK(write(traced[1], "", 1) == 1);
  CHECK(read(told[0], &status, 1) == 1);
  CHECK(waitpid(pid, &status, __WALL) == pid);
  CHECK(write(traced[1], "", 1) == 1);
  CHECK(waitpid(worker, &status, 0) == worker && status == 0);
}

/// It has nothing of ours but its two pipes, and ends with us, as does what it has started; once a
/// worker is killed that has nobody to talk to.
void leaves_nothing() {
  set_brain(
      "sleep 1000 & read -r q; printf '{\"number\": 1, \"error\": \"%s %s ' $! $$; "
      "ls /proc/self/fd | tr '\\n' ' '; echo '\"}'; cat > /dev/null; sleep 1000");
  int child = 0, brain_itself = 0, after = 0;
  {
    BrainProcess brain;
    const std::string said = why_not(&brain);
    CHECK(std::sscanf(said.c_str(), "%d %d %n", &child, &brain_itself, &after) == 2);
    CHECK(said.substr(static_cast<std::size_t>(after)) == "0 1 2 3 ");  // 3 is of ls
    CHECK(kill(child, 0) == 0 && kill(brain_itself, 0) == 0);
  }
  CHECK(is_gone(brain_itself));
  int ends[2];
  CHECK(pipe2(ends, O_CLOEXEC) == 0);
  const pid_t worker = fork();
  if (worker == 0) {
    set_brain(
        "read -r q; exec 3<&0; cat <&3 > /dev/null & "
        "printf '{\"number\": 1, \"error\": \"%s %s\"}\\n' $! $$; wait");
    BrainProcess brain;
    int told[2];
    CHECK(std::sscanf(why_not(&brain).c_str(), "%d %d", &told[0], &told[1]) == 2);
    CHECK(write(ends[1], told, sizeof told) == sizeof told);
    raise(SIGKILL);
  }
  close(ends[1]);
  for (int* told : {&child, &brain_itself}) CHECK(read(ends[0], told, sizeof *told) == 4);
  waitpid(worker, nullptr, 0);
  CHECK(is_gone(brain_itself) && is_gone(child));
}

/// A new artifact comes while a brain thinks about the one before: its answer is nobody's.
void forgotten_question() {
  set_brain(
      "while read -r q; do f=', \"error\": \"old\"'; case $q in "
      "*'\"brain\": 1, \"forgotten\": [],'*) sleep 0.3;; "
      "*'\"brain\": 2, \"forgotten\": [1],'*) f='" +
      kTableField + "';; esac; printf '%s%s}\\n' \"${q%%,*}\" \"$f\"; done");
  static auto* brains = new BrainThread;  // its thread lives as long as the process
  BrainQuestion second = kQuestion;
  second.brain = 2;
  const auto nobodys = brains->ask(kQuestion);
  sleep_ns(100'000'000);
  brains->forget(1);
  const BrainAnswer got = brains->ask(second).get();
  CHECK(got.problem.empty() && got.table == kTable && nobodys.valid());
}

}  // namespace

int main() {
  alarm(100);  // a test that hangs fails
  for (int descriptor = 3; descriptor < 1'024; ++descriptor) close(descriptor);
  dup2(open("/dev/null", O_RDONLY | O_CLOEXEC), 0);
  for (auto* test : {good_and_bad_answers, full_history, slow_and_dead, slow_start, pauses,
                     died_while_idle, does_not_end, leaves_nothing, forgotten_question}) {
    test();
  }
  return g_failures != 0;
}
