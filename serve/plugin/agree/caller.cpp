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

/// A ballot, and its connection to the arbiter, if any.
class Caller {
 public:
  Caller(const Arbiter& arbiter, const Vote& vote, const Limits& limits, std::uint64_t patience_ms,
         Exchange* exchange) noexcept
      : arbiter_(arbiter),
        limits_(limits),
        exchange_(exchange),
        ballot_(vote, limits, patience_ms, monotonic_ms()) {}
  ~Caller() { open(-1); }
  Caller(const Caller&) = delete;
  Caller& operator=(const Caller&) = delete;

  Verdict agree() noexcept {
    // Where no socket can be had at all nobody answers however long one waits.
    if (!open(socket(arbiter_.address.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0))) {
      std::snprintf(exchange_->reply.reason, sizeof exchange_->reply.reason, "no socket: %s",
                    std::strerror(errno));
      return Verdict::kAbstain;
    }
    while (ballot_.step() != Ballot::Step::kDone) {
      switch (ballot_.step()) {
        case Ballot::Step::kConnect:
          open(-1);
          wait(0, ballot_.at_ms());
          if (!leaves()) report(connect());
          break;
        case Ballot::Step::kSend:
          report(send_vote());
          break;
        case Ballot::Step::kListen:
          listen();
          break;
        case Ballot::Step::kDone:
          break;
      }
      ballot_.look_at_clock(monotonic_ms());
      if (leaves()) ballot_.leave();
    }
    exchange_->reply = ballot_.reply();
    return ballot_.verdict();
  }

 private:
  /// How often a rank that waits looks whether its communicator is aborted.
  static constexpr std::uint64_t kLookMs = 10;

  enum class Heard : std::uint8_t { kAll, kEnd, kNothing };

  bool leaves() const noexcept { return exchange_->leaves != nullptr && exchange_->leaves->load(); }

  void report(bool has_worked) noexcept {
    has_worked ? ballot_.worked(monotonic_ms()) : ballot_.failed(monotonic_ms());
  }

  /// Takes another descriptor; -1: none.
  bool open(int descriptor) noexcept {
    // A child that was forked meanwhile may have it too.
    if (descriptor_ >= 0) shutdown(descriptor_, SHUT_RDWR);
    if (descriptor_ >= 0) close(descriptor_);
    descriptor_ = descriptor;
    size_ = 0;
    return descriptor >= 0;
  }

  /// Waits for an event; false at `until_ms`, or where the descriptor cannot be waited for, or when
  /// the communicator is aborted. Without a descriptor it sleeps.
  bool wait(short event, std::uint64_t until_ms) const noexcept {
    for (;;) {
      const std::uint64_t now = monotonic_ms();
      if (now >= until_ms || leaves()) return false;
      const std::uint64_t longest = exchange_->leaves != nullptr ? kLookMs : 1'000'000;
      pollfd waited = {descriptor_, event, 0};
      const int count = poll(&waited, 1, static_cast<int>(std::min(until_ms - now, longest)));
      if (count > 0) return true;
      if (count < 0 && errno != EINTR) return false;
    }
  }

  bool connect() noexcept {
    const int kind = SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, one = 1;
    if (!open(socket(arbiter_.address.ss_family, kind, 0))) return false;
    setsockopt(descriptor_, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    const auto* to = reinterpret_cast<const sockaddr*>(&arbiter_.address);
    int error = ::connect(descriptor_, to, arbiter_.size) == 0 ? 0 : errno;
    socklen_t size = sizeof error;
    if (error == EINPROGRESS && wait(POLLOUT, ballot_.until_ms())) {
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

  /// The ballot's vote under the key, with what goes along with it.
  bool send_vote() noexcept {
    Vote sent = ballot_.vote();
    const bool has_body = exchange_->told != nullptr && sent.kind == VoteKind::kVote;
    if (!has_body) sent.body_bytes = 0;
    sent.body_digest = has_body ? siphash(arbiter_.key, exchange_->told, sent.body_bytes) : 0;
    sent.mac = mac_of(arbiter_.key, sent);
    // Of a body that takes longer than patience only a part is sent, and it ends there.
    const std::uint64_t until_ms = has_body ? ballot_.until_ms() : monotonic_ms() + limits_.ask_ms;
    return send_all(&sent, sizeof sent, until_ms) &&
           send_all(exchange_->told, sent.body_bytes, until_ms);
  }

  /// All of `bytes`, of which `*size` are there, an end of the connection, or nothing in time.
  Heard hear_all(void* bytes, std::size_t wanted, std::size_t* size) noexcept {
    while (*size < wanted) {
      const ssize_t got = recv(descriptor_, static_cast<char*>(bytes) + *size, wanted - *size, 0);
      if (got == 0 || (got < 0 && errno != EINTR && errno != EAGAIN)) return Heard::kEnd;
      if (got > 0) *size += static_cast<std::size_t>(got);
      if (got < 0 && !wait(POLLIN, ballot_.until_ms())) return Heard::kNothing;
    }
    return Heard::kAll;
  }

  void listen() noexcept {
    const Heard heard = hear_all(&heard_, sizeof heard_, &size_);
    if (heard == Heard::kNothing) return;
    size_ = 0;
    // What is not under the key, or of no use, ends this connection, as if it had broken.
    if (heard == Heard::kAll && can_use(heard_)) {
      ballot_.hear(heard_, monotonic_ms());
    } else {
      ballot_.failed(monotonic_ms());
    }
  }

  /// Whether a reply is under the key, and one that this rank can use; with what follows it.
  bool can_use(const Reply& reply) noexcept {
    const bool is_proposal = reply.kind == ReplyKind::kStillThere;
    if (!is_sound(arbiter_.key, reply, ballot_.vote())) return false;
    if (reply.body_bytes > 0) {
      std::size_t size = 0;
      if (!is_proposal || exchange_->body == nullptr ||
          hear_all(exchange_->body, reply.body_bytes, &size) != Heard::kAll ||
          reply.body_digest != siphash(arbiter_.key, exchange_->body, reply.body_bytes)) {
        return false;
      }
    }
    if (!is_proposal || ballot_.has_confirmed()) return true;  // or said twice
    exchange_->proposal = reply;
    return exchange_->accepts == nullptr || exchange_->accepts(exchange_->user, *exchange_);
  }

  const Arbiter& arbiter_;
  const Limits& limits_;
  Exchange* exchange_;
  Ballot ballot_;
  int descriptor_ = -1;
  Reply heard_;
  std::size_t size_ = 0;  // of it that is there
};

}  // namespace

bool parse_address(const char* text, Arbiter* arbiter) noexcept {
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
  arbiter->address = {};
  arbiter->address.ss_family = is_six ? AF_INET6 : AF_INET;
  arbiter->size = is_six ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
  auto* four = reinterpret_cast<sockaddr_in*>(&arbiter->address);
  auto* six = reinterpret_cast<sockaddr_in6*>(&arbiter->address);
  four->sin_port = htons(static_cast<std::uint16_t>(port));  // at one place in both
  void* to = is_six ? static_cast<void*>(&six->sin6_addr) : &four->sin_addr;
  return inet_pton(arbiter->address.ss_family, host, to) == 1;
}

Verdict agree_by_arbiter(const Arbiter& arbiter, const Vote& vote, const Limits& limits,
                         std::uint64_t patience_ms, Exchange* exchange) noexcept {
  return Caller(arbiter, vote, limits, patience_ms, exchange).agree();
}

}  // namespace dynamiccl
