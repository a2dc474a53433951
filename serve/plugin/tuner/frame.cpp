// See frame.h.
#include "tuner/frame.h"

#include <errno.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tuner/endpoint.h"

namespace dynamiccl {

void mac_of(const std::uint8_t (&key)[kDigestBytes], const std::uint8_t* request_mac,
            const void* message, std::size_t size, std::uint8_t (&mac)[kDigestBytes]) noexcept {
  static constexpr std::uint8_t kNone[kDigestBytes] = {};
  const Piece pieces[] = {{request_mac != nullptr ? request_mac : kNone, kDigestBytes},
                          {message, size}};
  hmac_sha256(key, kDigestBytes, pieces, 2, mac);
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
