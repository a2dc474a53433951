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

}  // namespace dynamiccl
