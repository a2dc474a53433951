// Never blocks without a deadline, and never raises SIGPIPE.
#include "brain/socket_brain.h"

#include <errno.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "brain/reason.h"
#include "file.h"
#include "platform/allocate.h"
#include "platform/threads.h"
#include "trusted/socket.h"

namespace dynamiccl {
namespace {

constexpr std::uint64_t kNsPerMs = 1'000'000;
constexpr std::uint64_t kRetryNs = 10 * kNsPerMs;

/// Waits until `descriptor` is ready for `events`; false when `deadline_ns` has passed.
bool wait_until(int descriptor, short events, std::uint64_t deadline_ns) noexcept {
  for (;;) {
    const std::uint64_t now_ns = monotonic_ns();
    if (now_ns >= deadline_ns) return false;
    pollfd waited = {descriptor, events, 0};
    const int left_ms = static_cast<int>((deadline_ns - now_ns) / kNsPerMs) + 1;
    const int ready = poll(&waited, 1, left_ms);
    if (ready > 0) return true;  // an error or the end shows in the next read or write
    if (ready < 0 && errno != EINTR) return false;
  }
}

/// Moves all of `size` bytes with `step`, which reads or writes some; returns null or what failed.
template <typename Step>
const char* move_all(int descriptor, short events, std::size_t size, std::uint64_t deadline_ns,
                     const Step& step) noexcept {
  for (std::size_t done = 0; done < size;) {
    if (!wait_until(descriptor, events, deadline_ns)) return "it does not answer in time";
    const ssize_t moved = step(done);
    if (moved > 0) done += static_cast<std::size_t>(moved);
    if (moved == 0) return "it closed the connection";
    if (moved < 0 && errno != EINTR && errno != EAGAIN) return "the connection broke";
  }
  return nullptr;
}

const char* send_all(int descriptor, const std::uint8_t* bytes, std::size_t size,
                     std::uint64_t deadline_ns) noexcept {
  return move_all(descriptor, POLLOUT, size, deadline_ns, [&](std::size_t done) {
    return send(descriptor, bytes + done, size - done, MSG_NOSIGNAL | MSG_DONTWAIT);
  });
}

const char* receive_all(int descriptor, std::uint8_t* bytes, std::size_t size,
                        std::uint64_t deadline_ns) noexcept {
  return move_all(descriptor, POLLIN, size, deadline_ns, [&](std::size_t done) {
    return recv(descriptor, bytes + done, size - done, MSG_DONTWAIT);
  });
}

/// Null when the process at the other end belongs to this user, else why not.
const char* peer_problem(int descriptor) noexcept {
  ucred peer = {};
  socklen_t size = sizeof peer;
  if (getsockopt(descriptor, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0 || size != sizeof peer) {
    return "its user is not known";
  }
  return peer.uid == geteuid() ? nullptr : "it runs as another user";
}

}  // namespace

SocketBrain::~SocketBrain() {
  disconnect();
  std::free(ask_);
}

void SocketBrain::disconnect() noexcept {
  if (descriptor_ >= 0) close(descriptor_);
  descriptor_ = -1;
}

bool SocketBrain::open(const dynamiccl_brain_config& config, char* reason,
                       std::size_t reason_bytes) noexcept {
  const char* strings[] = {config.artifact, config.system, config.socket};
  const std::size_t limits[] = {kMaxArtifactBytes, kMaxSystemBytes, sizeof(sockaddr_un::sun_path)};
  std::size_t sizes[3], total = 0;
  for (int i = 0; i < 3; ++i) {
    sizes[i] = strings[i] != nullptr ? strnlen(strings[i], limits[i] + 1) + 1 : 0;
    if (sizes[i] == 0 || sizes[i] > limits[i]) {
      say(reason, reason_bytes, "the path of the brain's socket or the artifact's is too long");
      return false;
    }
    total += sizes[i];
  }
  ask_ = static_cast<std::uint8_t*>(std::malloc(kMaxAskBytes + total));
  if (ask_ == nullptr) {
    say(reason, reason_bytes, "no memory is left");
    return false;
  }
  config_ = config;
  const char** kept[] = {&config_.artifact, &config_.system, &config_.socket};
  char* end = reinterpret_cast<char*>(ask_) + kMaxAskBytes;
  for (int i = 0; i < 3; ++i) {
    *kept[i] = static_cast<const char*>(std::memcpy(end, strings[i], sizes[i]));
    end += sizes[i];
  }
  return true;
}

const char* SocketBrain::connect_now() noexcept {
  if (const char* problem = check_trusted_socket(config_.socket)) return problem;
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, config_.socket, std::strlen(config_.socket));
  descriptor_ = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (descriptor_ < 0) return "this process can have no more sockets";
  if (const char* problem = wait_for_connection(descriptor_, &address)) return problem;
  return peer_problem(descriptor_);
}

const char* SocketBrain::wait_for_connection(int descriptor, const void* address) const noexcept {
  const std::uint64_t deadline_ns = monotonic_ns() + limits_.connect_ns;
  for (;;) {
    const auto* where = static_cast<const sockaddr*>(address);
    if (connect(descriptor, where, sizeof(sockaddr_un)) == 0) return nullptr;
    // A full queue of connections gives EAGAIN, for which poll() cannot wait.
    if (errno != EAGAIN && errno != EINTR) return "nobody listens there";
    if (monotonic_ns() >= deadline_ns) return "it does not take the connection in time";
    sleep_ns(kRetryNs);
  }
}

const char* SocketBrain::exchange(std::size_t ask_bytes, BrainAnswer* answer) noexcept {
  if (descriptor_ < 0) {
    if (const char* problem = connect_now()) return problem;
  }
  const std::uint64_t deadline_ns = monotonic_ns() + limits_.answer_ns;
  if (const char* problem = send_all(descriptor_, ask_, ask_bytes, deadline_ns)) return problem;
  if (const char* problem = receive_all(descriptor_, answer_, kBrainLengthBytes, deadline_ns)) {
    return problem;
  }
  const auto size = static_cast<std::size_t>(read_unsigned(answer_, kBrainLengthBytes));
  if (size > sizeof answer_) return "it answers something that is no message";
  if (const char* problem = receive_all(descriptor_, answer_, size, deadline_ns)) return problem;
  return read_answer(answer_, size, number_, answer);
}

bool SocketBrain::decide(const dynamiccl_history& history, std::uint8_t* table,
                         std::size_t capacity, std::size_t* table_bytes, char* reason,
                         std::size_t reason_bytes) noexcept {
  *table_bytes = 0;
  const std::size_t ask_bytes = write_ask(++number_, config_, history, ask_);
  if (ask_bytes == 0) {
    say(reason, reason_bytes, "the history is impossible");
    return false;
  }
  BrainAnswer answer = {};
  if (const char* problem = exchange(ask_bytes, &answer)) {
    // Bytes left in a broken connection would be taken for the next answer.
    disconnect();
    say(reason, reason_bytes, "brain at %s: %s", config_.socket, problem);
    return false;
  }
  if (answer.kind == kBrainError) {
    const int length = static_cast<int>(std::min<std::size_t>(answer.body_bytes, reason_bytes));
    say(reason, reason_bytes, "brain at %s: %.*s", config_.socket, length,
        reinterpret_cast<const char*>(answer.body));
    return false;
  }
  if (answer.body_bytes > capacity) {
    say(reason, reason_bytes, "the table does not fit the buffer");
    return false;
  }
  if (answer.body_bytes > 0) std::memcpy(table, answer.body, answer.body_bytes);
  *table_bytes = answer.body_bytes;
  return true;
}

namespace {

void close_socket_brain(void* brain) { deallocate(static_cast<SocketBrain*>(brain)); }

int open_socket_brain(const dynamiccl_brain_config* config, void** brain, char* reason,
                      std::size_t reason_bytes) {
  auto* client = allocate<SocketBrain>(SocketLimits{});
  if (client == nullptr) {
    say(reason, reason_bytes, "no memory is left");
    return 1;
  }
  if (!client->open(*config, reason, reason_bytes)) {
    close_socket_brain(client);
    return 1;
  }
  *brain = client;
  return 0;
}

int ask_socket_brain(void* brain, const dynamiccl_history* history, std::uint8_t* table,
                     std::size_t capacity, std::size_t* table_bytes, char* reason,
                     std::size_t reason_bytes) {
  auto* client = static_cast<SocketBrain*>(brain);
  return client->decide(*history, table, capacity, table_bytes, reason, reason_bytes) ? 0 : 1;
}

constexpr dynamiccl_brain kSocketBrain = {DYNAMICCL_BRAIN_VERSION, "socket", open_socket_brain,
                                          ask_socket_brain, close_socket_brain};

}  // namespace

const dynamiccl_brain* socket_brain() noexcept { return &kSocketBrain; }

}  // namespace dynamiccl
