// Implementation of brain_thread.h.
#include "arbiter/brain_thread.h"

#include <limits.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <system_error>
#include <thread>
#include <utility>

#include "identity/environment.h"

namespace dynamiccl {
namespace {

constexpr const char* kProgram = "dynamiccl-brain";

std::string beside_this_program() {
  char path[PATH_MAX] = "";
  const ssize_t size = readlink("/proc/self/exe", path, sizeof path - 1);
  const std::string own(path, size > 0 ? static_cast<std::size_t>(size) : 0);
  return own.substr(0, own.rfind('/') + 1) + kProgram;
}

}  // namespace

bool BrainThread::ask(std::uint64_t comm_id, BrainAsk question) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!open_.emplace(comm_id, last_number_ + 1).second) return false;
  if (!is_running_) {
    try {
      std::thread(&BrainThread::run, this).detach();  // as long as the worker
      is_running_ = true;
    } catch (const std::system_error&) {  // no thread can be had: it is asked at a later stop
      open_.erase(comm_id);
      return false;
    }
  }
  questions_.push_back({comm_id, ++last_number_, std::move(question)});
  has_question_.notify_one();
  return true;
}

std::unique_ptr<BrainAnswer> BrainThread::take(std::uint64_t comm_id) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = answers_.find(comm_id);
  if (found == answers_.end()) return nullptr;
  auto answer = std::make_unique<BrainAnswer>(std::move(found->second));
  answers_.erase(found);
  open_.erase(comm_id);
  return answer;
}

void BrainThread::forget(std::uint64_t comm_id) {
  const std::lock_guard<std::mutex> lock(mutex_);
  answers_.erase(comm_id);
  open_.erase(comm_id);
  forgotten_.push_back(comm_id);
}

void BrainThread::run() {
  for (;;) {
    Question question;
    // Of one that was forgotten nobody wants the answer, and least of all the next one of that
    // communicator, which is about another artifact.
    const auto is_wanted = [this, &question] {
      const auto open = open_.find(question.comm_id);
      return open != open_.end() && open->second == question.number;
    };
    {
      std::unique_lock<std::mutex> lock(mutex_);
      has_question_.wait(lock, [this] { return !questions_.empty(); });
      for (const std::uint64_t comm_id : forgotten_) brains_.erase(comm_id);
      forgotten_.clear();
      question = std::move(questions_.front());
      questions_.pop_front();
      if (!is_wanted()) continue;
    }
    BrainAnswer answer = think(question.comm_id, question.ask);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (is_wanted()) answers_[question.comm_id] = std::move(answer);
  }
}

BrainAnswer BrainThread::think(std::uint64_t comm_id, const BrainAsk& question) {
  const char* socket = value_of("DYNAMICCL_BRAIN_SOCKET");
  const bool is_ours = socket == nullptr;
  if (is_ours) {
    if (const char* problem = start_brain()) return {problem, {}};
  }
  std::unique_ptr<BrainConnection>& brain = brains_[comm_id];
  if (brain == nullptr) {
    brain = is_ours ? std::make_unique<BrainConnection>(address_, size_)
                    : std::make_unique<BrainConnection>(socket);
  }
  return brain->ask(question);
}

/// Null where it runs, else why not. Its socket has a name that the kernel draws, in no directory.
const char* BrainThread::start_brain() {
  if (brain_ > 0 && waitpid(brain_, nullptr, WNOHANG) == 0) return nullptr;
  brain_ = 0;
  brains_.clear();  // of the one before
  const std::string program = beside_this_program();
  if (access(program.c_str(), X_OK) != 0) {
    return "dynamiccl-brain is not there: build and install the plugin with --torch, or start "
           "'dynamiccl-deploy brain' and set DYNAMICCL_BRAIN_SOCKET";
  }
  const int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  address_ = {};
  address_.sun_family = AF_UNIX;
  size_ = sizeof address_;
  auto* address = reinterpret_cast<sockaddr*>(&address_);
  const bool listens = listener >= 0 && bind(listener, address, sizeof address_.sun_family) == 0 &&
                       listen(listener, 64) == 0 && getsockname(listener, address, &size_) == 0;
  const pid_t worker = getpid();
  const pid_t child = listens ? fork() : -1;
  if (child == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);   // with this thread, so with the worker
    if (getppid() != worker) _exit(0);  // which was killed before that
    setpriority(PRIO_PROCESS, 0, 19);   // the processors are the first rank's
    char* words[] = {const_cast<char*>(kProgram), nullptr};
    if (dup2(listener, 0) == 0) execv(program.c_str(), words);
    _exit(127);
  }
  if (listener >= 0) close(listener);
  if (child < 0) return "dynamiccl-brain cannot be started";
  brain_ = child;
  return nullptr;
}

}  // namespace dynamiccl
