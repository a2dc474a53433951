// Sockets of the agreement: the coordinator's address, request and answer, and the server thread.
//
// Over TCP every message carries an HMAC under the job's key; an answer's HMAC also covers the
// request, so that it is valid for that request only. On one node the socket is local and abstract
// (it vanishes with its process), and each side checks the other's user with the kernel.
#pragma once

#include <sys/socket.h>

#include <cstdint>

#include "crypto/sha256.h"
#include "tuner/coordinator.h"
#include "tuner/message.h"

namespace dynamiccl {

struct Endpoint {
  sockaddr_storage address;
  socklen_t size;
  bool is_local;
  std::uint8_t key[kDigestBytes];  // zeros where is_local
};

/// Resolves `host:port` or `[v6]:port` and reads the key, on a thread of its own: a silent name
/// server takes minutes, and a file system may stall. Null on success, else why not.
const char* find_endpoint(const char* coordinator, const char* key_file, std::uint64_t limit_ms,
                          Endpoint* endpoint) noexcept;

/// The address of the local socket that the job's processes on this node use.
void local_endpoint(std::uint64_t attempt, Endpoint* endpoint) noexcept;

/// Sends one request; false without an answer within the limit.
bool ask(const Endpoint& endpoint, const Request& request, std::uint64_t limit_ms,
         Answer* answer) noexcept;

/// Makes this process the coordinator if the endpoint is on this host and nobody listens there.
/// Call repeatedly: an earlier attempt of the job may hold the address for a while. Does nothing
/// once it has succeeded.
void try_to_coordinate(const Endpoint& endpoint, std::uint64_t attempt) noexcept;

std::uint64_t now_ms() noexcept;

/// A random number, never 0.
std::uint64_t draw_number() noexcept;

/// A message as sent, followed by its HMAC-SHA-256.
template <typename Message>
struct Frame {
  Message message;
  std::uint8_t mac[kDigestBytes] = {};
};
static_assert(sizeof(Frame<Request>) == sizeof(Request) + kDigestBytes, "no gaps");
static_assert(sizeof(Frame<Answer>) == sizeof(Answer) + kDigestBytes, "no gaps");

/// The HMAC of a message; an answer's also covers that of the request (null for a request).
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

/// Reads available bytes, up to `capacity` in all; false at the end and on an error.
bool read_some(int descriptor, void* bytes, std::size_t capacity, std::size_t* size) noexcept;
bool write_all(int descriptor, const void* bytes, std::size_t size,
               std::uint64_t until_ms) noexcept;
/// Waits for a poll() event; false at the deadline.
bool wait_for(int descriptor, short event, std::uint64_t until_ms) noexcept;
/// Whether the process at the other end of a local socket belongs to our user, or to root.
bool is_own_user(int descriptor) noexcept;

}  // namespace dynamiccl
