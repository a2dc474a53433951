// The coordinator's thread: at most 128 connections of one request each, and no blocking call but
// poll(). The log has a thread of its own, since a file system may stall.
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

#include "identity/environment.h"
#include "platform/allocate.h"
#include "platform/threads.h"
#include "tuner/endpoint.h"
#include "tuner/log.h"

namespace dynamiccl {
namespace {

constexpr int kMostConnections = 128;
constexpr std::uint64_t kConnectionLimitMs = 2'000;
/// A rank sends its request at once: if all slots are taken, a connection without a request after
/// this time is dropped.
constexpr std::uint64_t kCrowdedLimitMs = 100;
constexpr int kLookMs = 100;
constexpr std::uint64_t kLingerMs = 2'000;

struct Connection {
  /// First marked unused, then closed: a forked child closes the descriptors it finds here, and by
  /// then the number may belong to a file of the job.
  void end() noexcept { close(descriptor.exchange(-1)); }

  std::atomic<int> descriptor{-1};
  std::uint64_t since_ms = 0;
  std::size_t size = 0;  // of what has come of the frame
  Frame<Request> frame;
};

struct Server {
  Server(const Endpoint& where, std::uint64_t attempt, int listening) noexcept
      : endpoint(where),
        listener(listening),
        coordinator(
            attempt, [](void*) { return draw_number(); },
            [](void*, const Coordinator::Decided& decided) { log_decision(decided); }, nullptr) {}

  void run() noexcept;
  bool rests() noexcept;
  bool accept_one() noexcept;
  void serve(Connection* connection) noexcept;
  void end_those_older_than(std::uint64_t age_ms) noexcept;

  Endpoint endpoint;
  int listener;
  Mutex mutex;  // of the coordinator; exit() looks at it from another thread
  Coordinator coordinator;
  int most = kMostConnections;
  int num_open = 0;
  Connection connections[kMostConnections];
};

Mutex g_mutex;  // held from a listening socket's making until a forked child would find it
std::atomic<Server*> g_server{nullptr};
std::atomic<pid_t> g_pid{0};

void lock_before_fork() noexcept { g_mutex.lock(); }
void unlock_in_parent() noexcept { g_mutex.unlock(); }

/// A forked child has no server thread, and must not keep the address.
void forget_in_child() noexcept {
  g_mutex.unlock();
  Server* server = g_server.exchange(nullptr);
  if (server == nullptr) return;
  close(server->listener);
  for (Connection& connection : server->connections) {
    if (connection.descriptor >= 0) connection.end();
  }
}

void linger() {
  Server* server = g_server.load();
  if (server == nullptr || g_pid.load() != getpid()) return;
  const std::uint64_t until_ms = now_ms() + kLingerMs;
  for (std::uint64_t now = now_ms(); now < until_ms; now = now_ms()) {
    {
      const Lock lock(&server->mutex);
      // A rank that has confirmed must not be left without an answer.
      if (now > until_ms - kLingerMs / 2) server->coordinator.retire(now);
      if (!server->coordinator.is_awaited() && log_is_written()) return;
    }
    sleep_ns(2'000'000);
  }
}

bool Server::rests() noexcept {
  const Lock lock(&mutex);
  coordinator.look_at_clock(now_ms());
  return num_open == 0 && !coordinator.has_open_rounds();
}

bool Server::accept_one() noexcept {
  const int descriptor = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
  if (descriptor < 0) {
    // Out of descriptors, for example: the job needs them more than we do, and poll() would spin.
    if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) sleep_ns(20'000'000);
    return false;
  }
  if (endpoint.is_local && !is_own_user(descriptor)) {
    close(descriptor);
    return true;
  }
  for (Connection& connection : connections) {
    if (connection.descriptor >= 0) continue;
    connection.descriptor = descriptor;
    connection.since_ms = now_ms();
    connection.size = 0;
    ++num_open;
    return true;
  }
  close(descriptor);
  return false;
}

void Server::end_those_older_than(std::uint64_t age_ms) noexcept {
  const std::uint64_t now = now_ms();
  for (Connection& connection : connections) {
    if (connection.descriptor < 0 || now - connection.since_ms <= age_ms) continue;
    connection.end();
    --num_open;
  }
}

void Server::serve(Connection* connection) noexcept {
  const Frame<Request>& frame = connection->frame;
  bool ends =
      !read_some(connection->descriptor, &connection->frame, sizeof frame, &connection->size);
  if (!ends && connection->size == sizeof frame) {
    ends = true;
    if (is_sealed(endpoint.key, nullptr, frame)) {
      Frame<Answer> answer;
      const Lock lock(&mutex);
      coordinator.answer(frame.message, now_ms(), &answer.message);
      seal(endpoint.key, frame.mac, &answer);
      // The socket's buffer is empty, so this does not block.
      if (write_all(connection->descriptor, &answer, sizeof answer, now_ms())) {
        coordinator.note_sent(frame.message);
      }
    }
  }
  if (!ends) return;
  connection->end();
  --num_open;
}

void Server::run() noexcept {
  pollfd waited[kMostConnections + 1];
  Connection* of[kMostConnections + 1];
  for (;;) {
    nfds_t count = 0;
    if (num_open < most) waited[count++] = {listener, POLLIN, 0};
    const nfds_t first = count;
    for (Connection& connection : connections) {
      if (connection.descriptor < 0) continue;
      of[count] = &connection;
      waited[count++] = {connection.descriptor, POLLIN, 0};
    }
    if (poll(waited, count, rests() ? -1 : kLookMs) < 0) continue;
    for (nfds_t i = first; i < count; ++i) {
      if (waited[i].revents != 0) serve(of[i]);
    }
    if (first == 1 && waited[0].revents != 0) {
      while (num_open < most && accept_one()) {
      }
    }
    end_those_older_than(num_open < most ? kConnectionLimitMs : kCrowdedLimitMs);
  }
}

/// A bound socket, or -1. Port 0 only tests whether the address belongs to this host.
int bound(const sockaddr_storage& address, socklen_t size) noexcept {
  const int descriptor = socket(address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (descriptor < 0) return -1;
  const int yes = 1, no = 0;
  if (address.ss_family != AF_UNIX) {
    setsockopt(descriptor, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  }
  if (address.ss_family == AF_INET6) {
    setsockopt(descriptor, IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof no);
  }
  if (bind(descriptor, reinterpret_cast<const sockaddr*>(&address), size) == 0) return descriptor;
  close(descriptor);
  return -1;
}

bool is_loopback(const sockaddr_storage& address) noexcept {
  if (address.ss_family == AF_INET6) {
    const auto& v6 = reinterpret_cast<const sockaddr_in6&>(address);
    return IN6_IS_ADDR_LOOPBACK(&v6.sin6_addr);
  }
  return reinterpret_cast<const sockaddr_in&>(address).sin_addr.s_addr == htonl(INADDR_LOOPBACK);
}

/// Binds the port on all interfaces if the address belongs to this host: its own name may resolve
/// to another address here (127.0.1.1 in Debian's /etc/hosts) than on the other nodes.
int bound_to_all(const Endpoint& endpoint) noexcept {
  sockaddr_storage probe = endpoint.address, all = {};
  // The port is at the same offset in both address families.
  auto* v6 = reinterpret_cast<sockaddr_in6*>(&all);
  v6->sin6_family = AF_INET6;
  v6->sin6_port = reinterpret_cast<const sockaddr_in&>(endpoint.address).sin_port;
  reinterpret_cast<sockaddr_in&>(probe).sin_port = 0;
  const int probed = bound(probe, endpoint.size);
  if (probed < 0) return -1;
  close(probed);
  const int descriptor = bound(all, sizeof(sockaddr_in6));
  if (descriptor >= 0) return descriptor;
  const in_port_t port = v6->sin6_port;  // no IPv6 here
  all = {};
  reinterpret_cast<sockaddr_in&>(all).sin_family = AF_INET;
  reinterpret_cast<sockaddr_in&>(all).sin_port = port;
  return bound(all, sizeof(sockaddr_in));
}

int listen_at(const Endpoint& endpoint) noexcept {
  const bool as_it_is = endpoint.is_local || is_loopback(endpoint.address);
  const int listener = as_it_is ? bound(endpoint.address, endpoint.size) : bound_to_all(endpoint);
  if (listener < 0) return -1;
  if (listen(listener, SOMAXCONN) == 0) return listener;
  close(listener);
  return -1;
}

}  // namespace

void try_to_coordinate(const Endpoint& endpoint, std::uint64_t attempt) noexcept {
  const Lock lock(&g_mutex);
  if (g_server.load() != nullptr) return;
  static bool is_registered = false;  // under g_mutex
  if (!is_registered) {
    is_registered = true;
    pthread_atfork(lock_before_fork, unlock_in_parent, forget_in_child);
    std::atexit(linger);
  }
  const int listener = listen_at(endpoint);
  if (listener < 0) return;
  auto* server = allocate<Server>(endpoint, attempt, listener);
  if (server == nullptr) {
    close(listener);
    return;
  }
  rlimit limit = {};
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur / 8 < kMostConnections) {
    server->most = limit.rlim_cur < 16 ? 2 : static_cast<int>(limit.rlim_cur / 8);
  }
  start_log();
  const auto run = [](void* argument) -> void* {
    static_cast<Server*>(argument)->run();
    return nullptr;
  };
  if (!start_thread(run, server, "dynamiccl")) {
    close(listener);
    deallocate(server);
    return;
  }
  g_pid.store(getpid());
  g_server.store(server);
}

}  // namespace dynamiccl
