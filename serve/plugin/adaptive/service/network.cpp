// Only run() waits: sockets are non-blocking, and a stalled peer fills only its own buffer.
#include "adaptive/service/network.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

#include "platform/allocate.h"
#include "platform/threads.h"

namespace dynamiccl {
namespace {

constexpr int kBacklog = 512;
constexpr std::size_t kReadBytes = 64 * 1024;
constexpr int kListenFlags = SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC;

bool make_nonce(std::uint8_t (&nonce)[kNonceBytes]) noexcept {
  return getrandom(nonce, sizeof nonce, 0) == static_cast<ssize_t>(sizeof nonce);
}

/// Whether the process at the other end of a local socket is root's or this user's.
bool peer_is_trusted(int descriptor) noexcept {
  struct {
    pid_t pid;
    uid_t uid;
    gid_t gid;
  } peer;  // ucred, which only _GNU_SOURCE declares
  socklen_t size = sizeof peer;
  return getsockopt(descriptor, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 &&
         (peer.uid == 0 || peer.uid == geteuid());
}

constexpr std::uint64_t kNoDescriptorNs = 100'000'000;

/// Listening sockets, which a forked child must close.
std::atomic<int> g_listening[kMostListeners];
__attribute__((constructor)) void nothing_listens() {
  for (std::atomic<int>& kept : g_listening) kept.store(-1);
}

void close_in_child() noexcept {
  for (std::atomic<int>& kept : g_listening) {
    const int descriptor = kept.exchange(-1);
    if (descriptor >= 0) ::close(descriptor);
  }
}

/// TCP may connect a socket to itself when it is given the very port that it asks for and nobody
/// listens there; the future listener would then find the port taken.
bool is_its_own_peer(int descriptor, const Address& peer) noexcept {
  sockaddr_storage own = {};
  socklen_t size = sizeof own;
  return peer.storage.ss_family != AF_UNIX &&
         getsockname(descriptor, reinterpret_cast<sockaddr*>(&own), &size) == 0 &&
         size == peer.size && std::memcmp(&own, &peer.storage, size) == 0;
}

/// Without TIME_WAIT, in which the port would not be free either.
void close_at_once(int descriptor) noexcept {
  const linger at_once = {1, 0};
  setsockopt(descriptor, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
  close(descriptor);
}

void hurry(int descriptor) noexcept {
  const int yes = 1;
  setsockopt(descriptor, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
  setsockopt(descriptor, SOL_SOCKET, SO_KEEPALIVE, &yes, sizeof yes);
}

}  // namespace

bool Network::start(const Events& events, const Secret& secret) noexcept {
  events_ = events;
  secret_ = secret;
  rlimit limit = {};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) limit.rlim_cur = 1024;
  most_connections_ =
      static_cast<int>(std::min<rlim_t>(limit.rlim_cur / 2, rlim_t{kMostConnections}));
  pthread_atfork(nullptr, nullptr, close_in_child);
  wake_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  received_ = static_cast<std::uint8_t*>(std::malloc(kReadBytes));
  return wake_ >= 0 && received_ != nullptr && grow();
}

void Network::stop() noexcept {
  while (num_connections_ > 0) drop(connections_[0]);
  while (num_listeners_ > 0) stop_listening(listeners_[0].descriptor);
  listeners_capacity_ = 0;
  if (wake_ >= 0) ::close(wake_);
  wake_ = -1;
  std::free(listeners_);
  std::free(connections_);
  std::free(polled_);
  std::free(received_);
  received_ = nullptr;
  listeners_ = nullptr;
  connections_ = nullptr;
  polled_ = nullptr;
  capacity_ = 0;
}

/// Reserves room for one more connection, and for the listening sockets.
bool Network::grow() noexcept {
  if (num_connections_ < capacity_) return true;
  if (capacity_ >= most_connections_) return false;
  const int wanted = std::max(16, 2 * capacity_);
  auto* connections = static_cast<Connection**>(
      std::realloc(connections_, static_cast<std::size_t>(wanted) * sizeof *connections_));
  if (connections != nullptr) connections_ = connections;
  auto* polled = static_cast<pollfd*>(std::realloc(
      polled_, static_cast<std::size_t>(wanted + 1 + kMostListeners) * sizeof *polled_));
  if (polled != nullptr) polled_ = polled;
  if (connections == nullptr || polled == nullptr) return false;
  capacity_ = wanted;
  return true;
}

const char* Network::listen(Address* address, bool is_directory, int* descriptor) noexcept {
  if (num_listeners_ == kMostListeners) return "too many sockets";
  if (num_listeners_ == listeners_capacity_) {
    const int wanted = std::max(4, 2 * listeners_capacity_);
    auto* listeners = static_cast<Listener*>(
        std::realloc(listeners_, static_cast<std::size_t>(wanted) * sizeof *listeners_));
    if (listeners == nullptr) return "memory is short";
    listeners_ = listeners;
    listeners_capacity_ = wanted;
  }
  const int family = address->storage.ss_family;
  const int made = socket(family, kListenFlags, 0);
  if (made < 0) return "no socket can be made";
  auto* where = reinterpret_cast<sockaddr*>(&address->storage);
  const int yes = 1;
  // A restarted job may find its port in TIME_WAIT; another listener still blocks it.
  if (is_directory) setsockopt(made, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  if (bind(made, where, address->size) != 0) {
    const char* reason = errno == EADDRINUSE ? "its port is taken" : "it cannot be bound";
    ::close(made);
    return reason;
  }
  address->size = sizeof address->storage;
  if (::listen(made, kBacklog) != 0 ||
      (family != AF_UNIX && getsockname(made, where, &address->size) != 0)) {
    ::close(made);
    return "it does not listen";
  }
  listeners_[num_listeners_++] = {made, is_directory};
  for (std::atomic<int>& kept : g_listening) {
    int none = -1;
    if (kept.compare_exchange_strong(none, made)) break;
  }
  *descriptor = made;
  return nullptr;
}

void Network::stop_listening(int descriptor) noexcept {
  for (int i = 0; i < num_listeners_; ++i) {
    if (listeners_[i].descriptor != descriptor) continue;
    for (std::atomic<int>& kept : g_listening) {
      int this_one = descriptor;
      if (kept.compare_exchange_strong(this_one, -1)) break;
    }
    ::close(descriptor);
    listeners_[i] = listeners_[--num_listeners_];
    return;
  }
}

Connection* Network::add(int descriptor, Session::Role role, std::uint64_t comm_id,
                         std::uint64_t now_ns) noexcept {
  std::uint8_t nonce[kNonceBytes];
  auto* connection = grow() && make_nonce(nonce) ? allocate<Connection>() : nullptr;
  if (connection == nullptr) {
    ::close(descriptor);
    return nullptr;
  }
  connection->descriptor = descriptor;
  connection->is_client = role == Session::Role::kClient;
  connection->since_ns = now_ns;
  connections_[num_connections_++] = connection;
  if (connection->session.begin(role, secret_, comm_id, nonce)) return connection;
  drop(connection);
  return nullptr;
}

Connection* Network::connect(const Address& address, std::uint64_t comm_id,
                             std::uint64_t now_ns) noexcept {
  const int made = socket(address.storage.ss_family, kListenFlags, 0);
  if (made < 0) return nullptr;
  const bool is_local = address.storage.ss_family == AF_UNIX;
  if (!is_local) hurry(made);
  const auto* where = reinterpret_cast<const sockaddr*>(&address.storage);
  const int result = ::connect(made, where, address.size);
  if (result != 0 && errno != EINPROGRESS) {
    ::close(made);
    return nullptr;
  }
  if ((is_local && !peer_is_trusted(made)) || is_its_own_peer(made, address)) {
    close_at_once(made);
    return nullptr;
  }
  Connection* connection = add(made, Session::Role::kClient, comm_id, now_ns);
  if (connection == nullptr) return nullptr;
  connection->is_local = is_local;
  connection->is_connecting = result != 0;
  return connection;
}

void Network::accept_from(const Listener& listener, std::uint64_t now_ns) noexcept {
  for (int i = 0; i < kBacklog; ++i) {
    const int made = accept4(listener.descriptor, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (made < 0) {
      // Out of descriptors: poll() would report it again at once, and the job needs the next one.
      if (errno == EMFILE || errno == ENFILE) accept_at_ns_ = now_ns + kNoDescriptorNs;
      return;
    }
    sockaddr_storage own;
    socklen_t size = sizeof own;
    const bool is_local = getsockname(made, reinterpret_cast<sockaddr*>(&own), &size) == 0 &&
                          own.ss_family == AF_UNIX;
    const auto strangers = std::count_if(
        connections_, connections_ + num_connections_,
        [](const Connection* each) { return !each->is_client && !each->session.established(); });
    if (strangers >= kMostStrangers || (is_local && !peer_is_trusted(made))) {
      ::close(made);
      continue;
    }
    if (!is_local) hurry(made);
    Connection* connection = add(made, Session::Role::kServer, 0, now_ns);
    if (connection == nullptr) return;
    connection->is_local = is_local;
    connection->is_directory = listener.is_directory;
  }
}

/// Unlinks and frees a connection.
void Network::drop(Connection* connection) noexcept {
  for (int i = 0; i < num_connections_; ++i) {
    if (connections_[i] == connection) {
      connections_[i] = connections_[--num_connections_];
      break;
    }
  }
  if (connection->descriptor >= 0) ::close(connection->descriptor);
  deallocate(connection);
}

void Network::close(Connection* connection) noexcept {
  if (connection->descriptor >= 0) ::close(connection->descriptor);
  connection->descriptor = -1;  // run() drops it: it may be in use now
  connection->owner = nullptr;
}

void Network::disown(const Agreement* agreement) noexcept {
  for (int i = 0; i < num_connections_; ++i) {
    if (connections_[i]->owner == agreement) close(connections_[i]);
  }
}

bool Network::flush(Connection* connection) noexcept {
  for (;;) {
    std::size_t size = 0;
    const std::uint8_t* bytes = connection->session.pending(&size);
    if (size == 0 || connection->is_connecting) return true;
    const ssize_t sent = ::send(connection->descriptor, bytes, size, MSG_NOSIGNAL);
    if (sent < 0) return errno == EAGAIN || errno == EINTR;
    connection->session.sent(static_cast<std::size_t>(sent));
  }
}

bool Network::send(Connection* connection, const Message& message) noexcept {
  if (connection->descriptor < 0 || !connection->session.seal(message)) return false;
  if (!flush(connection)) {
    // The next run() reports the end: the sender may be in the middle of a loop.
    shutdown(connection->descriptor, SHUT_RDWR);
    return false;
  }
  return true;
}

void Network::read_from(Connection* connection) noexcept {
  struct Target {
    Network* network;
    Connection* connection;
  } target = {this, connection};
  const auto deliver = [](void* user, const Message& message) {
    const auto* to = static_cast<Target*>(user);
    if (to->connection->descriptor < 0) return;  // closed by a message before
    to->network->events_.message(to->network->events_.user, to->connection, message);
  };
  while (connection->descriptor >= 0) {
    const ssize_t got = recv(connection->descriptor, received_, kReadBytes, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return;
    const bool sound = got > 0 && connection->session.receive(
                                      received_, static_cast<std::size_t>(got), deliver, &target);
    if (connection->descriptor < 0) return;
    if (!sound || !flush(connection)) {
      events_.closed(events_.user, connection);
      close(connection);
      return;
    }
    if (connection->session.established() && !connection->was_established) {
      connection->was_established = true;
      events_.established(events_.user, connection);
    }
  }
}

/// Frees closed connections, and closes those that did not authenticate in time.
void Network::sweep(std::uint64_t now_ns) noexcept {
  for (int i = 0; i < num_connections_;) {
    Connection* connection = connections_[i];
    const bool is_late =
        !connection->session.established() && now_ns - connection->since_ns > kStrangerNs;
    if (is_late && connection->descriptor >= 0) {
      events_.closed(events_.user, connection);
      close(connection);
    }
    if (connection->descriptor < 0) {
      drop(connection);
    } else {
      ++i;
    }
  }
}

void Network::run(std::uint64_t timeout_ns) noexcept {
  sweep(monotonic_ns());
  int count = 0;
  polled_[count++] = {wake_, POLLIN, 0};
  const bool accepts = num_connections_ < most_connections_ && monotonic_ns() >= accept_at_ns_;
  if (!accepts) timeout_ns = std::min(timeout_ns, kNoDescriptorNs);
  for (int i = 0; i < num_listeners_; ++i) {
    polled_[count++] = {accepts ? listeners_[i].descriptor : -1, POLLIN, 0};
  }
  const int first = count, had_listeners = num_listeners_, had = num_connections_;
  for (int i = 0; i < had; ++i) {
    Connection* connection = connections_[i];
    std::size_t size = 0;
    connection->session.pending(&size);
    const bool writes = connection->is_connecting || size > 0;
    polled_[count++] = {connection->descriptor,
                        static_cast<short>(writes ? POLLIN | POLLOUT : POLLIN), 0};
  }
  const std::uint64_t timeout_ms =
      std::min<std::uint64_t>((timeout_ns + 999'999) / 1'000'000, 60'000);
  if (poll(polled_, static_cast<nfds_t>(count), static_cast<int>(timeout_ms)) <= 0) return;
  std::uint64_t drained;
  if (polled_[0].revents != 0 && read(wake_, &drained, sizeof drained) < 0) drained = 0;
  // Connections are appended, and removed only by sweep(), so the indices stay valid.
  for (int i = 0; i < had; ++i) {
    Connection* connection = connections_[i];
    const short events = polled_[first + i].revents;
    if (events == 0 || connection->descriptor < 0) continue;
    if ((events & POLLOUT) != 0 && connection->is_connecting) {
      int error = 0;
      socklen_t size = sizeof error;
      getsockopt(connection->descriptor, SOL_SOCKET, SO_ERROR, &error, &size);
      connection->is_connecting = error != 0;
      if (error != 0) {
        events_.closed(events_.user, connection);
        close(connection);
        continue;
      }
    }
    if ((events & POLLOUT) != 0 && !flush(connection)) {
      events_.closed(events_.user, connection);
      close(connection);
      continue;
    }
    if ((events & (POLLIN | POLLHUP | POLLERR)) != 0) read_from(connection);
  }
  const std::uint64_t now_ns = monotonic_ns();
  for (int i = 0; i < had_listeners && i < num_listeners_; ++i) {
    if (polled_[1 + i].revents != 0) accept_from(listeners_[i], now_ns);
  }
}

void Network::wake() noexcept {
  const std::uint64_t one = 1;
  if (wake_ >= 0 && ::write(wake_, &one, sizeof one) < 0) return;  // full: it is awake anyway
}

}  // namespace dynamiccl
