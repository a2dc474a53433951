// The brain of a job's communicators: a process that is started when it is first needed, the
// command in DYNAMICCL_BRAIN or dynamiccl-brain. It is killed when the arbiter's worker ends; what
// it has started itself reads the end of its stdin then. One thread asks it, one question after the
// other: ranks never wait for a brain. Every wait is bounded: one that is slow, dead or faulty is
// killed with all that it has started, and after a pause the next question starts another.
#pragma once

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <filesystem>
#include <future>
#include <iomanip>
#include <list>
#include <mutex>
#include <sstream>
#include <utility>

#include "brain/message.h"
#include "file.h"
#include "identity/environment.h"
#include "platform/system.h"

namespace dynamiccl {

/// Closes all descriptors but the standard ones.
inline void close_others() {
  if (syscall(436L, 3U, ~0U, 0U) == 0) return;  // close_range, as glibc calls it from 2.34 on
  for (int descriptor = 3; descriptor < 1'024; ++descriptor) close(descriptor);  // before Linux 5.9
}

struct BrainAnswer {
  std::string problem;              // why there is no decision
  std::vector<std::uint8_t> table;  // none: keep the one in force
};

struct BrainLimits {
  std::uint64_t answer_ms = 30'000;  // of a question and its answer
  std::uint64_t first_ms = 300'000;  // of a process's first: torch is loaded, beside a busy job
  std::uint64_t pause_ms = 1'000;    // after a failure; twice that after the next one
};

class BrainProcess {
 public:
  explicit BrainProcess(BrainLimits limits = {}) : limits_(limits) {}
  ~BrainProcess() { end(0); }

  BrainAnswer ask(const BrainQuestion& question) {
    if (process_ > 0) has_ended();  // while nobody asked: that fails no question
    if (!socket_.is_open() && monotonic_ms() < not_before_ms_) return {problem_, {}};
    BrainAnswer answer;
    std::string line;
    std::string problem = socket_.is_open() ? "" : start();
    if (problem.empty()) problem = exchange(line_of(question, ++number_), &line);
    if (problem.empty()) problem = read_answer(line, &answer);
    if (problem.empty()) {
      set_limit(limits_.answer_ms);
      // Else one communicator's questions, which end it, would have it started again for ever.
      if (question.brain == failed_) pause_ms_ = limits_.pause_ms;
    } else {
      failed_ = question.brain;
      // What it says from now on would be taken for the next answer.
      end(problem == kEnded ? kPatienceMs : 0);
      answer = {problem == kEnded ? how_ : problem, {}};
      not_before_ms_ = monotonic_ms() + pause_ms_;
      pause_ms_ = std::min(2 * pause_ms_, kMostPauseMs);
    }
    if (answer.problem.empty()) return answer;
    for (char& c : answer.problem) {
      if (c < 0x20 || c > 0x7e) c = '?';  // it becomes a line of a log
    }
    problem_ = "brain: " + answer.problem;
    return {problem_, {}};
  }

 private:
  static constexpr std::uint64_t kMostPauseMs = 300'000, kPatienceMs = 1'000;
  static constexpr const char* kNoAnswer = "it says something that is no answer";
  static constexpr const char* kEnded = "it has ended";

  const char* start() {
    if (process_ > 0) return "the one before does not end";
    const char* named = value_of("DYNAMICCL_BRAIN");
    std::error_code error;
    const std::string ours =
        std::filesystem::read_symlink("/proc/self/exe", error).replace_filename("dynamiccl-brain");
    const char* command[] = {"/bin/sh", "-c", named, nullptr};
    if (named == nullptr) {
      if (access(ours.c_str(), X_OK) != 0) {
        return "dynamiccl-brain is not there: build the plugin with --torch, or set "
               "DYNAMICCL_BRAIN (docs/search.md)";
      }
      command[0] = ours.c_str();
      command[1] = nullptr;
    }
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) return "no socket is left";
    socket_.reset(ends[0]);
    set_limit(limits_.first_ms);
    const pid_t worker = getpid();
    process_ = fork();
    if (process_ == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);   // with this thread, so with the worker
      if (getppid() != worker) _exit(0);  // which was killed before that
      setpriority(PRIO_PROCESS, 0, 19);   // the processors are the first rank's
      setsid();                           // what it starts ends with it
      for (int number = 1; number < NSIG; ++number) signal(number, SIG_DFL);
      // Where memory runs out it is to be ended, not a rank.
      [[maybe_unused]] const ssize_t told =
          write(open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC), "1000", 4);
      if (dup2(ends[1], 0) == 0 && dup2(0, 1) == 1) {
        // A program on a file server is long in coming; ranks wait for the end of these.
        close_others();
        execv(command[0], const_cast<char**>(command));
      }
      _exit(127);
    }
    close(ends[1]);
    return process_ > 0 ? "" : "it cannot be started";
  }

  void set_limit(std::uint64_t limit_ms) {
    limit_ms_ = limit_ms;
    const timeval limit = {static_cast<time_t>(limit_ms / 1'000),
                           static_cast<suseconds_t>(limit_ms % 1'000 * 1'000)};
    setsockopt(socket_.descriptor(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    setsockopt(socket_.descriptor(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  }

  /// Whether it has: all that it has started is killed then.
  bool has_ended() {
    siginfo_t told = {};
    const bool is_child = waitid(P_PID, process_, &told, WEXITED | WNOHANG | WNOWAIT) == 0;
    if (is_child && told.si_pid == 0) return false;
    if (is_child) kill(-process_, SIGKILL);  // until it is waited for its number is nobody else's
    waitpid(process_, nullptr, WNOHANG);
    process_ = 0;
    socket_.reset(-1);
    how_ = kEnded;
    if (!is_child) return true;  // a launcher lets nobody wait for children
    how_ += told.si_code == CLD_EXITED ? " with exit code " : " by signal ";
    how_ += std::to_string(told.si_status);
    return true;
  }

  /// Waits so long for it to end by itself, and no longer than `kPatienceMs` once it is killed: one
  /// that the kernel holds, for a file server, is waited for at the next question.
  void end(std::uint64_t patience_ms) {
    socket_.reset(-1);
    const std::uint64_t kill_ms = monotonic_ms() + patience_ms;
    for (; process_ > 0 && !has_ended(); sleep_ns(2'000'000)) {
      if (monotonic_ms() < kill_ms) continue;
      for (const pid_t target : {-process_, process_}) kill(target, SIGKILL);
      if (monotonic_ms() >= kill_ms + kPatienceMs) break;
    }
    if (monotonic_ms() >= kill_ms) how_ = "it has closed its output";
  }

  /// Sends one line, and takes one.
  const char* exchange(const std::string& question, std::string* answer) const {
    constexpr const char* kLate = "it does not answer in time";
    const int descriptor = socket_.descriptor();
    const std::uint64_t until_ms = monotonic_ms() + limit_ms_;
    const ssize_t sent = send(descriptor, question.data(), question.size(), MSG_NOSIGNAL);
    if (sent < 0 && errno != EAGAIN) return kEnded;
    if (sent != static_cast<ssize_t>(question.size())) return kLate;
    while (answer->find('\n') == std::string::npos) {
      char part[4'096];
      const ssize_t got = recv(descriptor, part, sizeof part, 0);
      if (monotonic_ms() >= until_ms || (got < 0 && errno == EAGAIN)) return kLate;
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) return kEnded;
      answer->append(part, static_cast<std::size_t>(got));
      if (answer->size() > kMostLineBytes) return kNoAnswer;
    }
    return answer->find('\n') + 1 == answer->size() ? "" : kNoAnswer;
  }

  const char* read_answer(const std::string& line, BrainAnswer* answer) const {
    std::uint64_t number = 0;
    bool has_table = false, has_error = false;
    JsonReader json(line);
    const auto read_field = [&](const std::string& name) {
      if (name == "number") return json.number(&number);
      has_table = has_table || name == "table";
      if (name == "table") return json.bytes(&answer->table);
      has_error = has_error || name == "error";
      return name == "error" && json.text(&answer->problem);
    };
    if (!json.object(read_field) || !json.has_ended()) return kNoAnswer;
    if (number != number_) return "it answers another question";
    if (has_error && answer->problem.empty()) answer->problem = "it gives no reason";
    const bool fits = !has_table || (!has_error && !answer->table.empty() &&
                                     answer->table.size() <= kMaxFileBytes);
    return fits ? "" : kNoAnswer;
  }

  static std::string line_of(const BrainQuestion& of, std::uint64_t number) {
    std::ostringstream line;
    line << std::fixed << std::setprecision(3);  // times are whole nanoseconds
    const auto list = [&line](const auto& items, const auto& write) {
      const char* between = "";
      line << '[';
      for (const auto& item : items) {
        line << std::exchange(between, ", ");
        write(item);
      }
      line << ']';
    };
    const auto write_call = [&](const TimedCall& call) {
      line << '[' << call.size_bytes << ", " << call.time_us << ", " << call.algorithm << ", "
           << call.protocol << ", " << call.num_channels << ", " << call.skew_us << ']';
    };
    line << "{\"number\": " << number << ", \"brain\": " << of.brain << ", \"forgotten\": ";
    list(of.forgotten, [&](std::uint64_t gone) { line << gone; });
    line << ", \"artifact\": " << json_of(of.artifact) << ", \"system\": " << json_of(of.system)
         << ", \"num_nodes\": " << of.num_nodes << ", \"num_ranks\": " << of.num_ranks
         << ", \"table\": \"" << hex_of_bytes(of.table) << "\", \"tasks\": ";
    list(of.tasks, [&](const TimedTask& task) {
      line << '[' << task.collective << ", " << task.bin << ", " << task.num_timed << ", ";
      list(task.calls, write_call);
      line << ']';
    });
    line << "}\n";
    return line.str();
  }

  const BrainLimits limits_;
  pid_t process_ = 0;
  File socket_;  // its stdin and stdout
  std::uint64_t limit_ms_ = 0, pause_ms_ = limits_.pause_ms, not_before_ms_ = 0;
  std::uint64_t failed_ = 0;   // the brain that was asked for at the last failure
  std::string problem_, how_;  // the last one, and how it has ended
  std::uint64_t number_ = 0;
};

class BrainThread {
 public:
  /// The answer, once it has come; not valid where no thread can be had.
  std::future<BrainAnswer> ask(BrainQuestion question) {
    const std::lock_guard<std::mutex> lock(mutex_);
    pthread_t thread;  // as long as the worker
    const auto run = [](void* brains) -> void* { static_cast<BrainThread*>(brains)->run(); };
    is_running_ = is_running_ || pthread_create(&thread, nullptr, run, this) == 0;
    if (!is_running_) return {};
    asked_.push_back({std::move(question), {}});
    has_question_.notify_one();
    return asked_.back().answer.get_future();
  }

  /// This brain asks no more, and nobody wants the answer to its last question.
  void forget(std::uint64_t brain) {
    const std::lock_guard<std::mutex> lock(mutex_);
    forgotten_.push_back(brain);
    asked_.remove_if([brain](const Asked& one) { return one.question.brain == brain; });
  }

 private:
  struct Asked {
    BrainQuestion question;
    std::promise<BrainAnswer> answer;
  };

  [[noreturn]] void run() {
    BrainProcess process;
    for (std::unique_lock<std::mutex> lock(mutex_);;) {
      has_question_.wait(lock, [this] { return !asked_.empty(); });
      Asked next = std::move(asked_.front());
      asked_.pop_front();
      next.question.forgotten = std::exchange(forgotten_, {});
      lock.unlock();
      next.answer.set_value(process.ask(next.question));
      lock.lock();
    }
  }

  std::mutex mutex_;  // of these
  std::condition_variable has_question_;
  bool is_running_ = false;
  std::list<Asked> asked_;
  std::vector<std::uint64_t> forgotten_;  // since the last question
};

}  // namespace dynamiccl
