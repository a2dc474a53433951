// Implementation of caller.h.
#include "agree/caller.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "agree/ballot.h"
#include "identity/environment.h"
#include "platform/clock.h"

namespace dynamiccl {
namespace {

/// How often a rank that waits looks whether its communicator is aborted.
constexpr std::uint64_t kLookMs = 10;

/// A connection to the arbiter, if any.
class Line {
 public:
  explicit Line(const std::atomic<bool>* leaves) noexcept : leaves_(leaves) {}
  ~Line() { open(-1); }
  Line(const Line&) = delete;
  Line& operator=(const Line&) = delete;

  bool leaves() const noexcept { return leaves_ != nullptr && leaves_->load(); }

  /// Takes another descriptor; -1: none.
  bool open(int descriptor) noexcept {
    if (descriptor_ >= 0) close(descriptor_);
    descriptor_ = descriptor;
    return descriptor >= 0;
  }

  /// Waits for an event; false at `until_ms`, or where the descriptor cannot be waited for, or when
  /// the communicator is aborted. Without a descriptor it sleeps.
  bool wait(short event, std::uint64_t until_ms) const noexcept {
    for (;;) {
      const std::uint64_t now = monotonic_ms();
      if (now >= until_ms || leaves()) return false;
      const std::uint64_t longest = leaves_ != nullptr ? kLookMs : 1'000'000;
      pollfd waited = {descriptor_, event, 0};
      const int count = poll(&waited, 1, static_cast<int>(std::min(until_ms - now, longest)));
      if (count > 0) return true;
      if (count < 0 && errno != EINTR) return false;
    }
  }

  bool connect(const ArbiterAddress& to, std::uint64_t until_ms) noexcept {
    if (!open(socket(to.address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0))) {
      return false;
    }
    const int one = 1;
    setsockopt(descriptor_, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (::connect(descriptor_, reinterpret_cast<const sockaddr*>(&to.address), to.size) == 0) {
      return true;
    }
    int error = errno;
    socklen_t size = sizeof error;
    if (error == EINPROGRESS && wait(POLLOUT, until_ms)) {
      getsockopt(descriptor_, SOL_SOCKET, SO_ERROR, &error, &size);
    }
    return error == 0;
  }

  bool send_all(const void* bytes, std::size_t size, std::uint64_t until_ms) noexcept {
    for (const auto* at = static_cast<const char*>(bytes); size > 0;) {
      const ssize_t sent = send(descriptor_, at, size, MSG_NOSIGNAL);
      if (sent < 0 && errno != EINTR && errno != EAGAIN) return false;
      if (sent < 0 && !wait(POLLOUT, until_ms)) return false;
      if (sent > 0) at += sent, size -= static_cast<std::size_t>(sent);
    }
    return true;
  }

  enum class Heard : std::uint8_t { kAll, kEnd, kNothing };

  /// All of `bytes`, of which `*size` are there, an end of the connection, or nothing until
  /// `until_ms`.
  Heard hear_all(void* bytes, std::size_t wanted, std::size_t* size,
                 std::uint64_t until_ms) noexcept {
    while (*size < wanted) {
      const ssize_t got = recv(descriptor_, static_cast<char*>(bytes) + *size, wanted - *size, 0);
      if (got == 0 || (got < 0 && errno != EINTR && errno != EAGAIN)) return Heard::kEnd;
      if (got > 0) {
        *size += static_cast<std::size_t>(got);
      } else if (!wait(POLLIN, until_ms)) {
        return Heard::kNothing;
      }
    }
    return Heard::kAll;
  }

 private:
  const std::atomic<bool>* leaves_;
  int descriptor_ = -1;
};

/// Sends the ballot's vote under the key, with what goes along with it.
bool send_vote(Line* line, const Key& key, const Ballot& ballot, const Limits& limits,
               const Exchange& exchange) noexcept {
  Vote sent = ballot.vote();
  const bool has_body = exchange.told != nullptr && sent.kind == VoteKind::kVote;
  if (!has_body) sent.body_bytes = 0;
  sent.body_digest = has_body ? siphash(key, exchange.told, sent.body_bytes) : 0;
  sent.mac = mac_of(key, sent);
  // Of a body that takes longer than patience only a part is sent, and it ends there.
  const std::uint64_t until_ms = has_body ? ballot.until_ms() : monotonic_ms() + limits.ask_ms;
  return line->send_all(&sent, sizeof sent, until_ms) &&
         line->send_all(exchange.told, sent.body_bytes, until_ms);
}

/// Whether a reply is under the key, and one that this rank can use; with what follows it.
bool can_use(Line* line, const Key& key, const Ballot& ballot, const Reply& reply,
             Exchange* exchange) noexcept {
  if (!is_sound(key, reply, ballot.vote())) return false;
  if (reply.body_bytes > 0) {
    if (reply.kind != ReplyKind::kStillThere || exchange->body == nullptr) return false;
    std::size_t size = 0;
    const Line::Heard heard =
        line->hear_all(exchange->body, reply.body_bytes, &size, ballot.until_ms());
    if (heard != Line::Heard::kAll) return false;
    if (reply.body_digest != siphash(key, exchange->body, reply.body_bytes)) return false;
  }
  if (reply.kind != ReplyKind::kStillThere || ballot.has_confirmed()) return true;  // or said twice
  exchange->proposal = reply;
  return exchange->accepts == nullptr || exchange->accepts(exchange->user, *exchange);
}

}  // namespace

bool parse_address(const char* text, ArbiterAddress* address) noexcept {
  *address = ArbiterAddress{};
  const char* colon = std::strrchr(text, ':');
  std::uint64_t port = 0;
  if (colon == nullptr || !parse_number(colon + 1, &port) || port == 0 || port > 65'535) {
    return false;
  }
  const bool is_six = text[0] == '[' && colon[-1] == ']';
  char host[INET6_ADDRSTRLEN] = "";
  const std::size_t size = static_cast<std::size_t>(colon - text) - (is_six ? 2 : 0);
  if (size >= sizeof host) return false;
  std::memcpy(host, text + (is_six ? 1 : 0), size);
  auto* four = reinterpret_cast<sockaddr_in*>(&address->address);
  auto* six = reinterpret_cast<sockaddr_in6*>(&address->address);
  address->address.ss_family = is_six ? AF_INET6 : AF_INET;
  address->size = is_six ? sizeof *six : sizeof *four;
  four->sin_port = htons(static_cast<std::uint16_t>(port));  // at one place in both
  void* to = is_six ? static_cast<void*>(&six->sin6_addr) : &four->sin_addr;
  return inet_pton(address->address.ss_family, host, to) == 1;
}

Verdict agree_by_arbiter(const ArbiterAddress& address, const Key& key, const Vote& vote,
                         const Limits& limits, std::uint64_t patience_ms, Reply* reply,
                         Exchange* exchange) noexcept {
  Line line(exchange->leaves);
  // Where no socket can be had at all nobody answers however long one waits.
  if (!line.open(socket(address.address.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0))) {
    std::snprintf(reply->reason, sizeof reply->reason, "no socket: %s", std::strerror(errno));
    return Verdict::kAbstain;
  }
  Ballot ballot(vote, limits, patience_ms, monotonic_ms());
  Reply heard;
  std::size_t size = 0;  // of what is heard
  const auto report = [&ballot](bool has_worked) {
    has_worked ? ballot.worked(monotonic_ms()) : ballot.failed(monotonic_ms());
  };
  while (ballot.step() != Ballot::Step::kDone) {
    switch (ballot.step()) {
      case Ballot::Step::kConnect:
        size = 0;
        line.open(-1);
        line.wait(0, ballot.at_ms());
        if (!line.leaves()) report(line.connect(address, ballot.until_ms()));
        break;
      case Ballot::Step::kSend:
        report(send_vote(&line, key, ballot, limits, *exchange));
        break;
      case Ballot::Step::kListen: {
        const Line::Heard got = line.hear_all(&heard, sizeof heard, &size, ballot.until_ms());
        if (got == Line::Heard::kNothing) break;
        size = 0;
        // What is not under the key, or of no use, ends this connection, as if it had broken.
        if (got == Line::Heard::kAll && can_use(&line, key, ballot, heard, exchange)) {
          ballot.hear(heard, monotonic_ms());
        } else {
          ballot.failed(monotonic_ms());
        }
        break;
      }
      case Ballot::Step::kDone:
        break;
    }
    ballot.look_at_clock(monotonic_ms());
    if (line.leaves()) ballot.leave();
  }
  *reply = ballot.reply();
  return ballot.verdict();
}

}  // namespace dynamiccl
