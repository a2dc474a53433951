// dynamiccl-brain: the policies of artifacts in TorchScript, for the leader of a job's
// communicators (arbiter/brain_thread.h), which starts it. Descriptor 0 is a Unix socket that
// listens; each connection is one communicator's (brain/message.h).
//
// A process of its own, so that whatever torch does, is slow at or crashes of takes nothing from
// the job and nothing from its arbiter.
#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>
#include <poll.h>
#include <sys/socket.h>
#include <torch/csrc/jit/runtime/graph_executor.h>
#include <unistd.h>

#include <cstdio>
#include <exception>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "brain/message.h"
#include "torch/scripted_brain.h"

namespace dynamiccl {
namespace {

constexpr int kUsage = 2;

struct Leader {
  int descriptor;
  std::unique_ptr<ScriptedBrain> brain;  // from its first question on
};

/// False at the end of the connection.
bool move_all(int descriptor, char* bytes, std::size_t size, bool is_sent) {
  while (size > 0) {
    const ssize_t moved = is_sent ? send(descriptor, bytes, size, MSG_NOSIGNAL)
                                  : recv(descriptor, bytes, size, MSG_WAITALL);
    if (moved <= 0) return false;
    bytes += moved, size -= static_cast<std::size_t>(moved);
  }
  return true;
}

BrainAnswer answer_to(const BrainAsk& ask, std::unique_ptr<ScriptedBrain>* brain) {
  try {
    if (*brain == nullptr) *brain = std::make_unique<ScriptedBrain>(ask);
    return {"", (*brain)->decide(ask.tasks)};
  } catch (const std::exception& error) {
    const std::string text = error.what();
    return {text.substr(0, text.find('\n')), {}};  // torch adds a backtrace
  }
}

/// Answers one question; false where the connection is of no more use.
bool serve(Leader* leader) {
  std::uint8_t length[kBrainLengthBytes];
  if (!move_all(leader->descriptor, reinterpret_cast<char*>(length), sizeof length, false)) {
    return false;
  }
  const std::uint64_t size = read_unsigned(length, sizeof length);
  if (size > kMaxBrainBytes) return false;
  std::string bytes(size, '\0');
  if (!move_all(leader->descriptor, bytes.data(), size, false)) return false;
  std::uint64_t number = 0;
  BrainAsk ask;
  const char* problem = decode_ask(bytes, &number, &ask);
  const BrainAnswer answer =
      problem != nullptr ? BrainAnswer{problem, {}} : answer_to(ask, &leader->brain);
  std::string told = encode_answer(number, answer);
  return move_all(leader->descriptor, told.data(), told.size(), true);
}

/// Whether it belongs to this user: the name of the socket is no secret.
bool is_own(int descriptor) {
  ucred peer = {};
  socklen_t size = sizeof peer;
  return getsockopt(descriptor, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 &&
         peer.uid == geteuid();
}

[[noreturn]] void serve_all() {
  std::list<Leader> leaders;
  for (;;) {
    std::vector<pollfd> waited = {{0, POLLIN, 0}};
    for (const Leader& leader : leaders) waited.push_back({leader.descriptor, POLLIN, 0});
    poll(waited.data(), waited.size(), -1);
    std::size_t i = 1;
    for (auto leader = leaders.begin(); leader != leaders.end(); ++i) {
      if (waited[i].revents == 0 || serve(&*leader)) {
        ++leader;
        continue;
      }
      close(leader->descriptor);
      leader = leaders.erase(leader);
    }
    if (waited[0].revents == 0) continue;
    const int descriptor = accept4(0, nullptr, nullptr, SOCK_CLOEXEC);
    if (descriptor >= 0 && is_own(descriptor)) {
      leaders.push_back({descriptor, nullptr});
    } else if (descriptor >= 0) {
      close(descriptor);
    } else {
      poll(nullptr, 0, 100);  // it has no descriptor left, and one more waits all the time
    }
  }
}

}  // namespace
}  // namespace dynamiccl

int main() {
  int listens = 0;
  socklen_t size = sizeof listens;
  if (getsockopt(0, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) != 0 || listens == 0) {
    std::fputs("dynamiccl-brain is started by dynamiccl-arbiter, in mode adaptive\n", stderr);
    return dynamiccl::kUsage;
  }
  at::set_num_threads(1);  // the processors are the job's
  at::set_num_interop_threads(1);
  const c10::InferenceMode no_gradients;
  // Without it the first calls are profiled and compiled anew, which takes 100 times as long.
  const torch::jit::GraphOptimizerEnabledGuard plain(false);
  dynamiccl::serve_all();
}
