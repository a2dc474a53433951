// Sockets of the agreement: where the coordinator is, one question and its answer, and the thread
// that answers.
//
// Over TCP every message carries an HMAC under the job's key; an answer's also covers the request,
// so that it answers nothing else. On one node the socket is local and abstract (gone with its
// process), and each side asks the kernel for the other's user.
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

/// `host:port` or `[v6]:port`, and the key: looked up on a thread of their own, since a silent name
/// server takes minutes and a file system may stall. Null on success, else why not.
const char* find_endpoint(const char* coordinator, const char* key_file, std::uint64_t limit_ms,
                          Endpoint* endpoint) noexcept;

/// Of the job's processes on this node.
void local_endpoint(std::uint64_t attempt, Endpoint* endpoint) noexcept;

/// Asks once; false without an answer within the limit.
bool ask(const Endpoint& endpoint, const Request& request, std::uint64_t limit_ms,
         Answer* answer) noexcept;

/// Makes this process the coordinator's, where the endpoint is on this host and nobody listens
/// there. To be called again and again: a former attempt of the job may hold the address for a
/// while. Once it has, it does nothing.
void try_to_coordinate(const Endpoint& endpoint, std::uint64_t attempt) noexcept;

std::uint64_t now_ms() noexcept;

/// A random number, never 0.
std::uint64_t draw_number() noexcept;

/// A message on the wire, and an HMAC-SHA-256 of it.
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
