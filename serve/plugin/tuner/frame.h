// A message on the wire: "DCA1", its length, the message, and an HMAC-SHA-256 of all that.
#pragma once

#include <cstddef>
#include <cstdint>

#include "crypto/sha256.h"
#include "file.h"
#include "tuner/message.h"

namespace dynamiccl {

struct Frame {
  static constexpr std::size_t kHead = 6;

  const std::uint8_t* body() const noexcept { return bytes + kHead; }
  std::size_t body_size() const noexcept { return read_unsigned(bytes + 4, 2); }
  const std::uint8_t* mac() const noexcept { return body() + body_size(); }
  /// What has come so far can still become a frame.
  bool may_be_one() const noexcept;
  bool is_whole() const noexcept {
    return size >= kHead && size == kHead + body_size() + kDigestBytes;
  }

  std::size_t size = 0;
  std::uint8_t bytes[kHead + kMaxRequestBytes + kDigestBytes];
};

/// Makes a frame; an answer's HMAC also covers that of the request.
void seal(const std::uint8_t key[kDigestBytes], const std::uint8_t* request_mac,
          const std::uint8_t* body, std::size_t size, Frame* frame) noexcept;
bool is_sealed(const std::uint8_t key[kDigestBytes], const std::uint8_t* request_mac,
               const Frame& frame) noexcept;

/// Reads what is there; false at the end, on an error and where it cannot be a frame any more.
bool read_some(int descriptor, Frame* frame) noexcept;
bool write_all(int descriptor, const std::uint8_t* bytes, std::size_t size,
               std::uint64_t until_ms) noexcept;
/// Waits for an event of poll(); false when it is too late.
bool wait_for(int descriptor, short event, std::uint64_t until_ms) noexcept;
/// Whether the process at the other end of a local socket is of our user, or root's.
bool is_own_user(int descriptor) noexcept;

}  // namespace dynamiccl
