// A message on the wire, and an HMAC-SHA-256 of it.
#pragma once

#include "crypto/sha256.h"
#include "tuner/message.h"

namespace dynamiccl {

template <typename Message>
struct Frame {
  Message message;
  std::uint8_t mac[kDigestBytes] = {};
};
static_assert(sizeof(Frame<Request>) == sizeof(Request) + kDigestBytes, "no gaps");
static_assert(sizeof(Frame<Answer>) == sizeof(Answer) + kDigestBytes, "no gaps");

/// The HMAC of a message; an answer's also covers that of the request (null: it is a request).
void mac_of(const std::uint8_t (&key)[kDigestBytes], const std::uint8_t* request_mac,
            const void* message, std::size_t size, std::uint8_t (&mac)[kDigestBytes]) noexcept;

template <typename Message>
void seal(const std::uint8_t (&key)[kDigestBytes], const std::uint8_t* request_mac,
          Frame<Message>* frame) noexcept {
  mac_of(key, request_mac, &frame->message, sizeof frame->message, frame->mac);
}

template <typename Message>
bool is_sealed(const std::uint8_t (&key)[kDigestBytes], const std::uint8_t* request_mac,
               const Frame<Message>& frame) noexcept {
  std::uint8_t mac[kDigestBytes];
  mac_of(key, request_mac, &frame.message, sizeof frame.message, mac);
  return equal_in_constant_time(mac, frame.mac, sizeof mac) && is_sound(frame.message);
}

/// Reads what is there, up to `capacity` bytes in all; false at the end and on an error.
bool read_some(int descriptor, void* bytes, std::size_t capacity, std::size_t* size) noexcept;
bool write_all(int descriptor, const void* bytes, std::size_t size,
               std::uint64_t until_ms) noexcept;
/// Waits for an event of poll(); false when it is too late.
bool wait_for(int descriptor, short event, std::uint64_t until_ms) noexcept;
/// Whether the process at the other end of a local socket is of our user, or root's.
bool is_own_user(int descriptor) noexcept;

}  // namespace dynamiccl
