// The brains of a job's communicators: dynamiccl-brain, which is started when it is first needed,
// or a process that listens at a socket (brain/connection.h). One thread asks them, one question
// after the other: ranks never wait for a brain.
//
//   DYNAMICCL_BRAIN_SOCKET  the brain is the process that listens there. Default: dynamiccl-brain,
//                           which lies beside this program where it was built with torch.
#pragma once

#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "brain/connection.h"
#include "identity/environment.h"

namespace dynamiccl {

class BrainThread {
 public:
  /// False while an earlier question of this communicator is open, and where no thread can be had.
  bool ask(std::uint64_t comm_id, BrainAsk question) {
    const std::lock_guard<std::mutex> lock(mutex_);
    pthread_t thread;  // as long as the worker
    const auto run = [](void* brains) -> void* { static_cast<BrainThread*>(brains)->run(); };
    is_running_ = is_running_ || pthread_create(&thread, nullptr, run, this) == 0;
    if (!is_running_ || !open_.emplace(comm_id, Open{++last_number_, nullptr}).second) return false;
    questions_.push_back({comm_id, last_number_, std::move(question)});
    has_question_.notify_one();
    return true;
  }

  /// The answer to it, once.
  std::unique_ptr<BrainAnswer> take(std::uint64_t comm_id) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto open = open_.find(comm_id);
    if (open == open_.end() || open->second.answer == nullptr) return nullptr;
    std::unique_ptr<BrainAnswer> answer = std::move(open->second.answer);
    open_.erase(open);
    return answer;
  }

  /// The communicator is no more, or its next question is about another artifact.
  void forget(std::uint64_t comm_id) {
    const std::lock_guard<std::mutex> lock(mutex_);
    open_.erase(comm_id);
    forgotten_.push_back(comm_id);
  }

 private:
  struct Question {
    std::uint64_t comm_id, number;
    BrainAsk ask;
  };
  struct Open {
    std::uint64_t number;
    std::unique_ptr<BrainAnswer> answer;  // none: not yet
  };

  [[noreturn]] void run() {
    for (std::unique_lock<std::mutex> lock(mutex_);;) {
      has_question_.wait(lock, [this] { return !questions_.empty(); });
      for (const std::uint64_t comm_id : forgotten_) brains_.erase(comm_id);
      forgotten_.clear();
      const Question question = std::move(questions_.front());
      questions_.pop_front();
      // Of one that was forgotten nobody wants the answer, and least of all the next one of that
      // communicator, which is about another artifact.
      if (find(question) == nullptr) continue;
      lock.unlock();
      auto answer = std::make_unique<BrainAnswer>(think(question));
      lock.lock();
      if (Open* open = find(question)) open->answer = std::move(answer);
    }
  }

  Open* find(const Question& question) {
    const auto open = open_.find(question.comm_id);
    return open != open_.end() && open->second.number == question.number ? &open->second : nullptr;
  }

  BrainAnswer think(const Question& question) {
    const char* socket = value_of("DYNAMICCL_BRAIN_SOCKET");
    if (socket == nullptr) {
      if (const char* problem = start_brain()) return {problem, {}};
    }
    std::unique_ptr<BrainConnection>& brain = brains_[question.comm_id];
    if (brain == nullptr) {
      brain = socket == nullptr ? std::make_unique<BrainConnection>(address_, size_)
                                : std::make_unique<BrainConnection>(socket);
    }
    return brain->ask(question.ask);
  }

  /// Null where it runs, else why not. Its socket has a name that the kernel draws, in no
  /// directory.
  const char* start_brain() {
    if (brain_ > 0 && waitpid(brain_, nullptr, WNOHANG) == 0) return nullptr;
    brain_ = 0;
    brains_.clear();  // of the one before
    std::error_code error;
    const std::string program =
        std::filesystem::read_symlink("/proc/self/exe", error).replace_filename("dynamiccl-brain");
    if (access(program.c_str(), X_OK) != 0) {
      return "dynamiccl-brain is not there: build and install the plugin with --torch, or start "
             "'dynamiccl-deploy brain' and set DYNAMICCL_BRAIN_SOCKET";
    }
    const int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    address_ = {};
    address_.sun_family = AF_UNIX;
    size_ = sizeof address_;
    auto* address = reinterpret_cast<sockaddr*>(&address_);
    const bool listens = bind(listener, address, sizeof address_.sun_family) == 0 &&
                         listen(listener, 64) == 0 && getsockname(listener, address, &size_) == 0;
    const pid_t worker = getpid();
    const pid_t child = listens ? fork() : -1;
    if (child == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);   // with this thread, so with the worker
      if (getppid() != worker) _exit(0);  // which was killed before that
      setpriority(PRIO_PROCESS, 0, 19);   // the processors are the first rank's
      if (dup2(listener, 0) == 0) execl(program.c_str(), "dynamiccl-brain", nullptr);
      _exit(127);
    }
    close(listener);
    if (child < 0) return "dynamiccl-brain cannot be started";
    brain_ = child;
    return nullptr;
  }

  std::mutex mutex_;  // of these
  std::condition_variable has_question_;
  bool is_running_ = false;
  std::deque<Question> questions_;
  std::vector<std::uint64_t> forgotten_;
  std::map<std::uint64_t, Open> open_;  // a communicator's question
  std::uint64_t last_number_ = 0;

  // The thread's.
  std::map<std::uint64_t, std::unique_ptr<BrainConnection>> brains_;
  pid_t brain_ = 0;  // of dynamiccl-brain
  sockaddr_un address_ = {};
  socklen_t size_ = 0;
};

}  // namespace dynamiccl
