// Never blocks without a deadline, and never raises SIGPIPE.
#include "brain/connection.h"

#include <errno.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "platform/clock.h"

namespace dynamiccl {
namespace {

constexpr std::uint64_t kRetryNs = 10'000'000;

/// Null when the process at the other end belongs to this user, else why not.
const char* why_not_peer(int descriptor) {
  ucred peer = {};
  socklen_t size = sizeof peer;
  if (getsockopt(descriptor, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0 || size != sizeof peer) {
    return "its user is not known";
  }
  return peer.uid == geteuid() ? nullptr : "it runs as another user";
}

}  // namespace

BrainConnection::BrainConnection(const std::string& path, const BrainLimits& limits)
    : path_(path), limits_(limits), size_(sizeof address_) {
  address_.sun_family = AF_UNIX;
  std::strncpy(address_.sun_path, path.c_str(), sizeof address_.sun_path - 1);
}

BrainConnection::BrainConnection(const sockaddr_un& address, socklen_t size,
                                 const BrainLimits& limits)
    : limits_(limits), address_(address), size_(size) {}

void BrainConnection::disconnect() {
  if (descriptor_ >= 0) close(descriptor_);
  descriptor_ = -1;
}

const char* BrainConnection::connect_now() {
  if (path_.size() >= sizeof address_.sun_path) return "its path is too long";
  descriptor_ = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (descriptor_ < 0) return "this process can have no more sockets";
  const std::uint64_t until_ms = monotonic_ms() + limits_.connect_ms;
  while (connect(descriptor_, reinterpret_cast<const sockaddr*>(&address_), size_) != 0) {
    // A full queue of connections gives EAGAIN, for which poll() cannot wait.
    if (errno != EAGAIN && errno != EINTR) return "nobody listens there";
    if (monotonic_ms() >= until_ms) return "it does not take the connection in time";
    sleep_ns(kRetryNs);
  }
  return why_not_peer(descriptor_);
}

/// Sends (POLLOUT) or receives (POLLIN) all of them; null, or what failed.
const char* BrainConnection::move_all(char* bytes, std::size_t size, short events,
                                      std::uint64_t until_ms) {
  for (std::size_t done = 0; done < size;) {
    const std::uint64_t now_ms = monotonic_ms();
    pollfd waited = {descriptor_, events, 0};
    const int left_ms = static_cast<int>(until_ms - std::min(now_ms, until_ms));
    const int ready = poll(&waited, 1, left_ms);
    if (ready == 0) return "it does not answer in time";
    if (ready < 0 && errno != EINTR) return "the connection broke";
    if (ready < 0) continue;
    const ssize_t moved = events == POLLOUT
                              ? send(descriptor_, bytes + done, size - done, MSG_NOSIGNAL)
                              : recv(descriptor_, bytes + done, size - done, 0);
    if (moved == 0) return "it closed the connection";
    if (moved < 0 && errno != EINTR && errno != EAGAIN) return "the connection broke";
    if (moved > 0) done += static_cast<std::size_t>(moved);
  }
  return nullptr;
}

const char* BrainConnection::exchange(const BrainAsk& ask, BrainAnswer* answer) {
  if (descriptor_ < 0) {
    if (const char* problem = connect_now()) return problem;
  }
  const std::uint64_t until_ms = monotonic_ms() + limits_.answer_ms;
  std::string asked = encode_ask(++number_, ask);
  if (const char* problem = move_all(asked.data(), asked.size(), POLLOUT, until_ms)) return problem;
  std::uint8_t length[kBrainLengthBytes];
  auto* at = reinterpret_cast<char*>(length);
  if (const char* problem = move_all(at, sizeof length, POLLIN, until_ms)) return problem;
  const std::uint64_t size = read_unsigned(length, sizeof length);
  if (size > kMaxBrainBytes) return "it sends something that is no message";
  std::string told(size, '\0');
  if (const char* problem = move_all(told.data(), size, POLLIN, until_ms)) return problem;
  return decode_answer(told, number_, answer);
}

BrainAnswer BrainConnection::ask(const BrainAsk& ask) {
  BrainAnswer answer;
  const std::string where = path_.empty() ? "" : " at " + path_;
  if (const char* problem = exchange(ask, &answer)) {
    disconnect();  // bytes left in it would be taken for the next answer
    return {"brain" + where + ": " + problem, {}};
  }
  if (!answer.problem.empty()) answer.problem = "brain" + where + ": " + answer.problem;
  return answer;
}

}  // namespace dynamiccl
