// The client side of endpoint.h, and code that both sides need.
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "file.h"
#include "identity/environment.h"
#include "platform/apart.h"
#include "platform/threads.h"
#include "trusted/file.h"
#include "tuner/endpoint.h"

namespace dynamiccl {
namespace {

/// Reads the key and resolves the address on a thread of its own, since both may stall.
struct LookUp {
  char host[256];
  char port[8];
  char key_file[4096];
  Endpoint found;
  const char* why_not;

  void run() noexcept;
};

void LookUp::run() noexcept {
  why_not = load_key(key_file, found.key);
  if (why_not != nullptr) {
    why_not = "DYNAMICCL_KEY_FILE cannot be used";
    return;
  }
  addrinfo hints = {}, *addresses = nullptr;
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  if (getaddrinfo(host, port, &hints, &addresses) != 0 || addresses == nullptr) {
    why_not = "the host in DYNAMICCL_COORDINATOR is not found";
    return;
  }
  std::memcpy(&found.address, addresses->ai_addr, addresses->ai_addrlen);
  found.size = addresses->ai_addrlen;
  freeaddrinfo(addresses);
}

/// Splits at the last colon and removes brackets.
bool split(const char* text, LookUp* look_up) noexcept {
  const char* colon = std::strrchr(text, ':');
  if (colon == nullptr || colon == text) return false;
  const int brackets = text[0] == '[' && colon[-1] == ']' ? 1 : 0;
  const int length = static_cast<int>(colon - text) - 2 * brackets;
  std::uint64_t port = 0;
  if (!parse_number(colon + 1, &port) || port == 0 || port > 65535 || length <= 0 ||
      length >= static_cast<int>(sizeof look_up->host)) {
    return false;
  }
  std::snprintf(look_up->host, sizeof look_up->host, "%.*s", length, text + brackets);
  std::snprintf(look_up->port, sizeof look_up->port, "%d", static_cast<int>(port));
  return true;
}

int connected(const Endpoint& endpoint, std::uint64_t until_ms) noexcept {
  const int socket_fd =
      socket(endpoint.address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (socket_fd < 0) return -1;
  const auto* address = reinterpret_cast<const sockaddr*>(&endpoint.address);
  int error = 0;
  if (connect(socket_fd, address, endpoint.size) != 0) {
    error = errno;
    if (error == EINPROGRESS && wait_for(socket_fd, POLLOUT, until_ms)) {
      socklen_t size = sizeof error;
      getsockopt(socket_fd, SOL_SOCKET, SO_ERROR, &error, &size);
    }
  }
  if (error == 0 && (!endpoint.is_local || is_own_user(socket_fd))) return socket_fd;
  close(socket_fd);
  return -1;
}

}  // namespace

const char* find_endpoint(const char* coordinator, const char* key_file, std::uint64_t limit_ms,
                          Endpoint* endpoint) noexcept {
  *endpoint = Endpoint{};
  LookUp look_up = {};
  if (key_file == nullptr) return "DYNAMICCL_KEY_FILE is not set";
  if (!split(coordinator, &look_up)) return "DYNAMICCL_COORDINATOR is not HOST:PORT";
  std::snprintf(look_up.key_file, sizeof look_up.key_file, "%s", key_file);
  if (!run_apart(&look_up, "dynamiccl-name", limit_ms)) {
    return "the host in DYNAMICCL_COORDINATOR, or DYNAMICCL_KEY_FILE, is not there in time";
  }
  *endpoint = look_up.found;
  return look_up.why_not;
}

void local_endpoint(std::uint64_t attempt, Endpoint* endpoint) noexcept {
  *endpoint = Endpoint{};
  endpoint->is_local = true;
  auto* address = reinterpret_cast<sockaddr_un*>(&endpoint->address);
  address->sun_family = AF_UNIX;
  // A leading zero makes the socket's name abstract: no file.
  const int length =
      std::snprintf(address->sun_path + 1, sizeof address->sun_path - 1, "dynamiccl-%u-%016llx",
                    static_cast<unsigned>(geteuid()), static_cast<unsigned long long>(attempt));
  endpoint->size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 +
                                          static_cast<std::size_t>(length));
}

bool ask(const Endpoint& endpoint, const Request& request, std::uint64_t limit_ms,
         Answer* answer) noexcept {
  const std::uint64_t until_ms = now_ms() + limit_ms;
  const int socket_fd = connected(endpoint, until_ms);
  if (socket_fd < 0) return false;
  Frame<Request> sent = {request, {}};
  Frame<Answer> got;
  seal(endpoint.key, nullptr, &sent);
  bool heard = write_all(socket_fd, &sent, sizeof sent, until_ms);
  for (std::size_t size = 0; heard && size < sizeof got;) {
    heard = wait_for(socket_fd, POLLIN, until_ms) && read_some(socket_fd, &got, sizeof got, &size);
  }
  close(socket_fd);
  *answer = got.message;
  return heard && is_sealed(endpoint.key, sent.mac, got);
}

std::uint64_t now_ms() noexcept { return monotonic_ns() / 1'000'000; }

std::uint64_t draw_number() noexcept {
  std::uint64_t number = 0;
  while (number == 0) {
    // Fallback where the kernel has no random numbers yet: differs by process and time.
    if (getrandom(&number, sizeof number, GRND_NONBLOCK) != sizeof number) {
      const std::uint64_t parts[] = {monotonic_ns(), static_cast<std::uint64_t>(getpid())};
      number = fnv1a(reinterpret_cast<const std::uint8_t*>(parts), sizeof parts);
    }
  }
  return number;
}

void mac_of(const std::uint8_t (&key)[kDigestBytes], const std::uint8_t* request_mac,
            const void* message, std::size_t size, std::uint8_t (&mac)[kDigestBytes]) noexcept {
  static constexpr std::uint8_t kNone[kDigestBytes] = {};
  const Piece pieces[] = {{request_mac != nullptr ? request_mac : kNone, kDigestBytes},
                          {message, size}};
  hmac_sha256(key, pieces, 2, mac);
}

bool read_some(int descriptor, void* bytes, std::size_t capacity, std::size_t* size) noexcept {
  const ssize_t got = read(descriptor, static_cast<char*>(bytes) + *size, capacity - *size);
  if (got < 0) return errno == EINTR || errno == EAGAIN;
  *size += static_cast<std::size_t>(got);
  return got > 0;
}

bool write_all(int descriptor, const void* bytes, std::size_t size,
               std::uint64_t until_ms) noexcept {
  for (const auto* next = static_cast<const char*>(bytes); size > 0;) {
    const ssize_t sent = send(descriptor, next, size, MSG_NOSIGNAL);
    if (sent < 0 && errno != EINTR && errno != EAGAIN) return false;
    if (sent < 0 && !wait_for(descriptor, POLLOUT, until_ms)) return false;
    if (sent > 0) {
      next += sent;
      size -= static_cast<std::size_t>(sent);
    }
  }
  return true;
}

bool wait_for(int descriptor, short event, std::uint64_t until_ms) noexcept {
  for (;;) {
    const std::uint64_t now = now_ms();
    if (now >= until_ms) return false;
    pollfd waited = {descriptor, event, 0};
    const int count = poll(&waited, 1, static_cast<int>(until_ms - now));
    if (count > 0) return true;
    if (count < 0 && errno != EINTR) return false;
  }
}

bool is_own_user(int descriptor) noexcept {
  ucred peer = {};
  socklen_t size = sizeof peer;
  return getsockopt(descriptor, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 &&
         (peer.uid == geteuid() || peer.uid == 0);
}

}  // namespace dynamiccl
