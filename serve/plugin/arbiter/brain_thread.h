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
#include <deque>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>

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
    std::shared_ptr<Brain>& brain = brains_[comm_id];
    if (brain == nullptr) brain = std::make_shared<Brain>();
    if (!is_running_ || brain->is_asked) return false;
    brain->is_asked = true;
    brain->question = std::move(question);
    asked_.push_back(brain);
    has_question_.notify_one();
    return true;
  }

  /// The answer to it, once.
  std::unique_ptr<BrainAnswer> take(std::uint64_t comm_id) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = brains_.find(comm_id);
    if (found == brains_.end() || found->second->answer == nullptr) return nullptr;
    found->second->is_asked = false;
    return std::move(found->second->answer);
  }

  /// The communicator is no more, or its next question is about another artifact: nobody wants the
  /// answer to this one.
  void forget(std::uint64_t comm_id) {
    const std::lock_guard<std::mutex> lock(mutex_);
    brains_.erase(comm_id);
  }

 private:
  struct Brain {
    bool is_asked = false;
    BrainAsk question;  // the thread's, as the connection is, from then until there is an answer
    std::unique_ptr<BrainAnswer> answer;
    std::unique_ptr<BrainConnection> connection;
    pid_t process = 0;  // to which dynamiccl-brain
  };

  [[noreturn]] void run() {
    for (std::unique_lock<std::mutex> lock(mutex_);;) {
      has_question_.wait(lock, [this] { return !asked_.empty(); });
      const std::shared_ptr<Brain> brain = std::move(asked_.front());
      asked_.pop_front();
      if (brain.use_count() == 1) continue;  // it was forgotten
      lock.unlock();
      auto answer = std::make_unique<BrainAnswer>(think(brain.get()));
      lock.lock();
      brain->answer = std::move(answer);
    }
  }

  BrainAnswer think(Brain* brain) {
    const char* socket = value_of("DYNAMICCL_BRAIN_SOCKET");
    if (socket == nullptr) {
      if (const char* problem = start_brain()) return {problem, {}};
    }
    if (brain->connection == nullptr || brain->process != process_) {
      brain->connection = socket == nullptr ? std::make_unique<BrainConnection>(address_, size_)
                                            : std::make_unique<BrainConnection>(socket);
      brain->process = process_;
    }
    return brain->connection->ask(brain->question);
  }

  /// Null where it runs, else why not. Its socket has a name that the kernel draws, in no
  /// directory.
  const char* start_brain() {
    if (process_ > 0 && waitpid(process_, nullptr, WNOHANG) == 0) return nullptr;
    process_ = 0;
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
    process_ = child;
    return nullptr;
  }

  std::mutex mutex_;  // of these
  std::condition_variable has_question_;
  bool is_running_ = false;
  std::map<std::uint64_t, std::shared_ptr<Brain>> brains_;  // by communicator
  std::deque<std::shared_ptr<Brain>> asked_;

  // The thread's: dynamiccl-brain.
  pid_t process_ = 0;
  sockaddr_un address_ = {};
  socklen_t size_ = 0;
};

}  // namespace dynamiccl
