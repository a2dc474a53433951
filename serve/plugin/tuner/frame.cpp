// See frame.h.
#include "tuner/frame.h"

#include <errno.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "tuner/endpoint.h"

namespace dynamiccl {
namespace {

constexpr std::uint8_t kFrameMagic[4] = {'D', 'C', 'A', '1'};

void mac_of(const std::uint8_t key[kDigestBytes], const std::uint8_t* request_mac,
            const Frame& frame, std::uint8_t (&mac)[kDigestBytes]) noexcept {
  static constexpr std::uint8_t kNone[kDigestBytes] = {};
  const Piece pieces[] = {{request_mac != nullptr ? request_mac : kNone, kDigestBytes},
                          {frame.bytes, Frame::kHead + frame.body_size()}};
  hmac_sha256(key, kDigestBytes, pieces, 2, mac);
}

}  // namespace

bool Frame::may_be_one() const noexcept {
  if (std::memcmp(bytes, kFrameMagic, std::min(size, sizeof kFrameMagic)) != 0) return false;
  return size < kHead || body_size() <= kMaxRequestBytes;
}

void seal(const std::uint8_t key[kDigestBytes], const std::uint8_t* request_mac,
          const std::uint8_t* body, std::size_t size, Frame* frame) noexcept {
  std::memcpy(frame->bytes, kFrameMagic, sizeof kFrameMagic);
  frame->bytes[4] = static_cast<std::uint8_t>(size);
  frame->bytes[5] = static_cast<std::uint8_t>(size >> 8);
  std::memcpy(frame->bytes + Frame::kHead, body, size);
  std::uint8_t mac[kDigestBytes];
  mac_of(key, request_mac, *frame, mac);
  std::memcpy(frame->bytes + Frame::kHead + size, mac, sizeof mac);
  frame->size = Frame::kHead + size + sizeof mac;
}

bool is_sealed(const std::uint8_t key[kDigestBytes], const std::uint8_t* request_mac,
               const Frame& frame) noexcept {
  std::uint8_t mac[kDigestBytes];
  mac_of(key, request_mac, frame, mac);
  return equal_in_constant_time(mac, frame.mac(), sizeof mac);
}

bool read_some(int descriptor, Frame* frame) noexcept {
  // Never more than this frame: what follows it is nobody's.
  const std::size_t wanted =
      frame->size < Frame::kHead ? Frame::kHead : Frame::kHead + frame->body_size() + kDigestBytes;
  const ssize_t got = read(descriptor, frame->bytes + frame->size, wanted - frame->size);
  if (got < 0) return errno == EINTR || errno == EAGAIN;
  frame->size += static_cast<std::size_t>(got);
  return got > 0 && frame->may_be_one();
}

bool write_all(int descriptor, const std::uint8_t* bytes, std::size_t size,
               std::uint64_t until_ms) noexcept {
  while (size > 0) {
    const ssize_t sent = send(descriptor, bytes, size, MSG_NOSIGNAL);
    if (sent < 0 && errno != EINTR && errno != EAGAIN) return false;
    if (sent < 0 && !wait_for(descriptor, POLLOUT, until_ms)) return false;
    if (sent > 0) {
      bytes += sent;
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
