// The brains of a job's communicators: dynamiccl-brain, which is started when it is first needed,
// or the process that listens at DYNAMICCL_BRAIN_SOCKET. One thread asks them, one question after
// the other: ranks never wait for a brain. Every wait is bounded: a slow, dead or faulty brain
// costs the thread some seconds, its connection is closed, and the next question makes another.
#pragma once

#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>

#include "brain/message.h"
#include "file.h"
#include "identity/environment.h"

namespace dynamiccl {

struct BrainAnswer {
  std::string problem;              // why there is no decision
  std::vector<std::uint8_t> table;  // none: keep the one in force
};

/// To the brain of one communicator, a process of this user.
class BrainConnection {
 public:
  /// `path`: of a socket in the file system; else `address` is used. `limit`: how long connecting,
  /// a question and its answer may take each; the first may have to wait for torch to be loaded.
  explicit BrainConnection(const std::string& path, timeval limit = {30, 0})
      : path_(path), limit_(limit) {
    address_.sun_family = AF_UNIX;
    std::strncpy(address_.sun_path, path.c_str(), sizeof address_.sun_path - 1);
  }
  BrainConnection(const sockaddr_un& address, socklen_t size) : address_(address), size_(size) {}

  /// Connects with the first question, so a brain may start after the job.
  BrainAnswer ask(const BrainAsk& ask) {
    BrainAnswer answer;
    if (const char* problem = exchange(ask, &answer)) {
      socket_.reset(-1);  // bytes left in it would be taken for the next answer
      answer = {problem, {}};
    }
    if (answer.problem.empty()) return answer;
    answer.problem = "brain" + (path_.empty() ? "" : " at " + path_) + ": " + answer.problem;
    return answer;
  }

 private:
  const char* connect_now() {
    if (path_.size() >= sizeof address_.sun_path) return "its path is too long";
    socket_.reset(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const int descriptor = socket_.descriptor();
    if (descriptor < 0) return "this process can have no more sockets";
    setsockopt(descriptor, SOL_SOCKET, SO_SNDTIMEO, &limit_, sizeof limit_);
    setsockopt(descriptor, SOL_SOCKET, SO_RCVTIMEO, &limit_, sizeof limit_);
    if (connect(descriptor, reinterpret_cast<const sockaddr*>(&address_), size_) != 0) {
      // As its queue of connections is full (man 7 unix).
      return errno == EAGAIN ? "it does not take the connection in time" : "nobody listens there";
    }
    return why_not_peer(descriptor);
  }

  const char* exchange(const BrainAsk& ask, BrainAnswer* answer) {
    const char* problem = socket_.is_open() ? nullptr : connect_now();
    const int descriptor = socket_.descriptor();
    MessageHeader header;
    std::string body = body_of(ask);
    if (problem == nullptr) problem = send_message(descriptor, MessageKind::kAsk, ++number_, body);
    if (problem == nullptr) problem = receive_message(descriptor, &header, &body);
    if (problem != nullptr) return problem;
    if (header.number != number_) return "it answers another question";
    if (header.kind == MessageKind::kError) {
      answer->problem = body.empty() ? "it gives no reason" : body;
      for (char& c : answer->problem) {
        if (c < 0x20 || c > 0x7e) c = '?';  // it becomes a line of a log
      }
      return nullptr;
    }
    answer->table.assign(body.begin(), body.end());
    const bool fits = header.kind == MessageKind::kKeep
                          ? body.empty()
                          : header.kind == MessageKind::kTable && !body.empty();
    return fits && body.size() <= kMaxFileBytes ? nullptr : kNoMessage;
  }

  static std::string body_of(const BrainAsk& ask) {
    std::string body;
    const auto put_text = [&body](const auto& text) {
      put(&body, static_cast<std::uint32_t>(text.size()));
      body.append(text.begin(), text.end());
    };
    put(&body, ask.num_nodes);
    put(&body, ask.num_ranks);
    put_text(ask.artifact);
    put_text(ask.system);
    put_text(ask.table);
    put(&body, static_cast<std::uint32_t>(ask.tasks.size()));
    for (const TimedTask& task : ask.tasks) {
      put(&body, task.collective);
      put(&body, task.bin);
      put(&body, static_cast<std::uint32_t>(task.calls.size()));
      auto number = task.num_timed - static_cast<std::int64_t>(task.calls.size());
      for (TimedCall call : task.calls) {
        call.number = static_cast<std::uint8_t>(++number);
        put(&body, call);
      }
    }
    return body;
  }

  const std::string path_;  // empty: none
  const timeval limit_ = {30, 0};
  sockaddr_un address_ = {};
  socklen_t size_ = sizeof address_;
  File socket_;
  std::uint64_t number_ = 0;
};

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
