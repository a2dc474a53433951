// Implementation of caller.h.
#include "agree/caller.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "identity/environment.h"
#include "platform/clock.h"

namespace dynamiccl {
namespace {

bool leaves(const Exchange* exchange) noexcept {
  return exchange != nullptr && exchange->leaves != nullptr && exchange->leaves->load();
}

/// How often a rank that waits looks whether its communicator is aborted.
constexpr std::uint64_t kLookMs = 10;

/// Waits for an event; false at `until_ms`, or where the descriptor cannot be waited for, or when
/// the communicator is aborted. Without a descriptor (-1) it sleeps.
bool wait_for(int descriptor, short event, std::uint64_t until_ms,
              const Exchange* exchange) noexcept {
  for (;;) {
    const std::uint64_t now = monotonic_ms();
    if (now >= until_ms || leaves(exchange)) return false;
    const bool may_leave = exchange != nullptr && exchange->leaves != nullptr;
    pollfd waited = {descriptor, event, 0};
    const int count = poll(
        &waited, 1,
        static_cast<int>(std::min<std::uint64_t>(until_ms - now, may_leave ? kLookMs : 1'000'000)));
    if (count > 0) return true;
    if (count < 0 && errno != EINTR) return false;
  }
}

/// A connection, or -1.
int connected(const ArbiterAddress& to, std::uint64_t until_ms, const Exchange* exchange) noexcept {
  const int one = 1;
  const int descriptor =
      socket(to.address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (descriptor < 0) return -1;
  setsockopt(descriptor, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  int error = 0;
  if (connect(descriptor, reinterpret_cast<const sockaddr*>(&to.address), to.size) != 0) {
    error = errno;
    socklen_t size = sizeof error;
    if (error == EINPROGRESS && wait_for(descriptor, POLLOUT, until_ms, exchange)) {
      getsockopt(descriptor, SOL_SOCKET, SO_ERROR, &error, &size);
    }
  }
  if (error == 0) return descriptor;
  close(descriptor);
  return -1;
}

bool send_all(int descriptor, const void* bytes, std::size_t size, std::uint64_t until_ms,
              const Exchange* exchange) noexcept {
  for (const auto* at = static_cast<const char*>(bytes); size > 0;) {
    const ssize_t sent = send(descriptor, at, size, MSG_NOSIGNAL);
    if (sent < 0 && errno != EINTR && errno != EAGAIN) return false;
    if (sent < 0 && !wait_for(descriptor, POLLOUT, until_ms, exchange)) return false;
    if (sent > 0) at += sent, size -= static_cast<std::size_t>(sent);
  }
  return true;
}

enum class Heard : std::uint8_t { kReply, kEnd, kNothing };

/// All of `bytes`, of which `*size` are there, an end of the connection, or nothing until
/// `until_ms`.
Heard hear_all(int descriptor, void* bytes, std::size_t wanted, std::size_t* size,
               std::uint64_t until_ms, const Exchange* exchange) noexcept {
  while (*size < wanted) {
    const ssize_t got = recv(descriptor, static_cast<char*>(bytes) + *size, wanted - *size, 0);
    if (got == 0 || (got < 0 && errno != EINTR && errno != EAGAIN)) return Heard::kEnd;
    if (got > 0) {
      *size += static_cast<std::size_t>(got);
    } else if (!wait_for(descriptor, POLLIN, until_ms, exchange)) {
      return Heard::kNothing;
    }
  }
  return Heard::kReply;
}

/// Whether a reply is under the key, and one that this rank can use; with what follows it.
bool can_use(int descriptor, const Key& key, const Ballot& ballot, const Reply& reply,
             Exchange* exchange) noexcept {
  if (!is_sound(key, reply, ballot.vote())) return false;
  if (reply.kind != ReplyKind::kStillThere || exchange == nullptr) return reply.body_bytes == 0;
  std::size_t size = 0;
  if (reply.body_bytes > 0) {
    const Heard heard = exchange->body == nullptr
                            ? Heard::kEnd
                            : hear_all(descriptor, exchange->body, reply.body_bytes, &size,
                                       ballot.until_ms(), exchange);
    if (heard != Heard::kReply) return false;
    if (reply.body_digest != siphash(key, exchange->body, reply.body_bytes)) return false;
  }
  if (ballot.has_confirmed()) return true;  // said twice
  exchange->proposal = reply;
  return exchange->accepts == nullptr || exchange->accepts(exchange->user, *exchange);
}

}  // namespace

bool parse_address(const char* text, ArbiterAddress* address) noexcept {
  *address = ArbiterAddress{};
  const char* colon = std::strrchr(text, ':');
  std::uint64_t port = 0;
  if (colon == nullptr || !parse_number(colon + 1, &port) || port == 0 || port > 65'535)
    return false;
  const bool is_six = text[0] == '[' && colon[-1] == ']';
  char host[INET6_ADDRSTRLEN] = "";
  const std::size_t size = static_cast<std::size_t>(colon - text) - (is_six ? 2 : 0);
  if (size >= sizeof host) return false;
  std::memcpy(host, text + (is_six ? 1 : 0), size);
  auto* four = reinterpret_cast<sockaddr_in*>(&address->address);
  auto* six = reinterpret_cast<sockaddr_in6*>(&address->address);
  if (is_six) {
    six->sin6_family = AF_INET6;
    six->sin6_port = htons(static_cast<std::uint16_t>(port));
    address->size = sizeof *six;
    return inet_pton(AF_INET6, host, &six->sin6_addr) == 1;
  }
  four->sin_family = AF_INET;
  four->sin_port = htons(static_cast<std::uint16_t>(port));
  address->size = sizeof *four;
  return inet_pton(AF_INET, host, &four->sin_addr) == 1;
}

Verdict agree_by_arbiter(const ArbiterAddress& address, const Key& key, const Vote& vote,
                         const Limits& limits, std::uint64_t patience_ms, Reply* reply,
                         Exchange* exchange) noexcept {
  // Where no socket can be had at all nobody answers however long one waits.
  int descriptor = socket(address.address.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (descriptor < 0) {
    std::snprintf(reply->reason, sizeof reply->reason, "no socket: %s", std::strerror(errno));
    return Verdict::kAbstain;
  }
  Ballot ballot(vote, limits, patience_ms, monotonic_ms());
  Reply heard;
  std::size_t size = 0;
  while (ballot.step() != Ballot::Step::kDone) {
    const std::uint64_t now = monotonic_ms();
    switch (ballot.step()) {
      case Ballot::Step::kConnect:
        if (descriptor >= 0) close(descriptor);
        size = 0;
        descriptor = -1;
        wait_for(-1, 0, ballot.at_ms(), exchange);
        if (leaves(exchange)) break;
        descriptor = connected(address, ballot.until_ms(), exchange);
        descriptor >= 0 ? ballot.worked(monotonic_ms()) : ballot.failed(monotonic_ms());
        break;
      case Ballot::Step::kSend: {
        Vote sent = ballot.vote();
        const bool has_body = exchange != nullptr && sent.kind == VoteKind::kVote;
        if (!has_body) sent.body_bytes = 0, sent.body_digest = 0;
        if (has_body) sent.body_digest = siphash(key, exchange->told, sent.body_bytes);
        sent.mac = mac_of(key, sent);
        // Of a body that takes longer than patience only a part is sent, and it ends there.
        const std::uint64_t until = has_body ? ballot.until_ms() : now + limits.ask_ms;
        bool is_sent = send_all(descriptor, &sent, sizeof sent, until, exchange);
        if (is_sent && has_body) {
          is_sent = send_all(descriptor, exchange->told, sent.body_bytes, until, exchange);
        }
        is_sent ? ballot.worked(monotonic_ms()) : ballot.failed(monotonic_ms());
        break;
      }
      case Ballot::Step::kListen:
        switch (hear_all(descriptor, &heard, sizeof heard, &size, ballot.until_ms(), exchange)) {
          case Heard::kReply:
            // What is not under the key, or of no use, ends this connection, as if it had broken.
            size = 0;
            can_use(descriptor, key, ballot, heard, exchange) ? ballot.hear(heard, monotonic_ms())
                                                              : ballot.failed(monotonic_ms());
            break;
          case Heard::kEnd:
            ballot.failed(monotonic_ms());
            break;
          case Heard::kNothing:
            break;
        }
        break;
      case Ballot::Step::kDone:
        break;
    }
    ballot.look_at_clock(monotonic_ms());
    if (leaves(exchange)) ballot.leave();
  }
  if (descriptor >= 0) close(descriptor);
  *reply = ballot.reply();
  return ballot.verdict();
}

}  // namespace dynamiccl
