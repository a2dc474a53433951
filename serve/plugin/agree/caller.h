// A rank's vote over TCP: drives a Ballot with blocking calls that have deadlines; no thread, and
// no name server.
#pragma once

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "agree/ballot.h"
#include "agree/vote.h"
#include "identity/environment.h"
#include "platform/system.h"

namespace dynamiccl {

/// The job's arbiter, as the wrapper found it.
struct Arbiter {
  sockaddr_storage address = {};
  socklen_t size = 0;
  Key key;
};

/// Takes an address such as "1.2.3.4:PORT" or "[IPV6]:PORT"; false where the text is none.
inline bool parse_address(const char* text, Arbiter* arbiter) noexcept {
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
  auto* four = reinterpret_cast<sockaddr_in*>(&arbiter->address);
  auto* six = reinterpret_cast<sockaddr_in6*>(&arbiter->address);
  arbiter->address = {};
  arbiter->address.ss_family = is_six ? AF_INET6 : AF_INET;
  arbiter->size = is_six ? sizeof *six : sizeof *four;
  four->sin_port = htons(static_cast<std::uint16_t>(port));  // at one place in both
  void* to = is_six ? static_cast<void*>(&six->sin6_addr) : &four->sin_addr;
  return inet_pton(arbiter->address.ss_family, host, to) == 1;
}

/// What the ranks of a round and the arbiter tell each other. The first is all that `init` needs.
struct Exchange {
  /// What was said in the end, or why there was no answer; but for kTable.
  char reason[sizeof Reply::reason] = "";
  ReplyKind heard = ReplyKind::kStranger;  // last, under the key
  Reply proposal;                          // what was confirmed
  const void* told = nullptr;              // `vote.body_bytes` that follow the vote
  /// What came with the proposal, kMostBodyBytes.
  std::uint8_t* body = nullptr;
  /// Whether this rank can use it; all that may fail. Asked before it confirms.
  bool (*accepts)(void* user, const Exchange& exchange) = nullptr;
  void* user = nullptr;
  /// Set by another thread: the communicator is being aborted.
  const std::atomic<bool>* leaves = nullptr;
};

/// A ballot, and its connection to the arbiter, if any.
struct Caller {
  /// How often a rank that waits looks whether its communicator is aborted.
  static constexpr std::uint64_t kLookMs = 10;

  const Arbiter& arbiter;
  const Limits& limits;
  Exchange* exchange;
  Ballot ballot;
  int descriptor = -1;

  Verdict agree() noexcept {
    while (ballot.step != Ballot::Step::kDone) {
      bool has_worked = false;
      if (ballot.step == Ballot::Step::kListen) {
        has_worked = listen();
      } else {
        has_worked = ballot.step == Ballot::Step::kConnect ? connect() : send_vote();
        if (has_worked) ballot.worked(monotonic_ms());
      }
      const std::uint64_t now_ms = monotonic_ms();
      if (leaves()) ballot.leave();
      // What is not under the key, or of no use, ends this connection, as if it had broken.
      if (!has_worked && now_ms < ballot.until_ms) {
        ballot.failed(now_ms, ballot.step == Ballot::Step::kConnect ? std::strerror(errno) : "");
      }
      ballot.look_at_clock(now_ms);
    }
    close_connection();
    std::memcpy(exchange->reason, ballot.reason, sizeof ballot.reason);
    return ballot.verdict;
  }

  bool leaves() const noexcept { return exchange->leaves != nullptr && exchange->leaves->load(); }

  void close_connection() noexcept {
    // A child that was forked meanwhile may have it too.
    if (descriptor >= 0) shutdown(descriptor, SHUT_RDWR);
    if (descriptor >= 0) close(descriptor);
    descriptor = -1;
  }

  /// Waits for an event; false at `until_ms`, or where the descriptor cannot be waited for, or when
  /// the communicator is aborted. Without a descriptor it sleeps.
  bool wait(short event, std::uint64_t until_ms) const noexcept {
    for (;;) {
      const std::uint64_t now = monotonic_ms();
      if (now >= until_ms || leaves()) return false;
      const std::uint64_t longest = exchange->leaves != nullptr ? kLookMs : 1'000'000;
      pollfd waited = {descriptor, event, 0};
      const int count = poll(&waited, 1, static_cast<int>(std::min(until_ms - now, longest)));
      if (count > 0) return true;
      if (count < 0 && errno != EINTR) return false;
    }
  }

  bool connect() noexcept {
    close_connection();
    wait(0, ballot.at_ms);
    const int kind = SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, one = 1;
    descriptor = socket(arbiter.address.ss_family, kind, 0);
    if (leaves() || descriptor < 0) return false;
    setsockopt(descriptor, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    const auto* to = reinterpret_cast<const sockaddr*>(&arbiter.address);
    if (::connect(descriptor, to, arbiter.size) == 0) return true;
    if (errno != EINPROGRESS || !wait(POLLOUT, ballot.until_ms)) return false;
    socklen_t size = sizeof errno;
    getsockopt(descriptor, SOL_SOCKET, SO_ERROR, &errno, &size);
    return errno == 0;
  }

  /// Takes `move` (send or recv) as often as it takes to move all bytes; false where that fails.
  template <typename Move>
  bool move_all(Move move, std::size_t size, short event, std::uint64_t until_ms) noexcept {
    for (std::size_t done = 0; done < size;) {
      const ssize_t moved = move(done, size - done);
      if (moved == 0 || (moved < 0 && errno != EINTR && errno != EAGAIN)) return false;
      if (moved < 0 && !wait(event, until_ms)) return false;
      if (moved > 0) done += static_cast<std::size_t>(moved);
    }
    return true;
  }
  bool send_all(const void* bytes, std::size_t size, std::uint64_t until_ms) noexcept {
    const auto move = [this, bytes](std::size_t from, std::size_t count) {
      return send(descriptor, static_cast<const char*>(bytes) + from, count, MSG_NOSIGNAL);
    };
    return move_all(move, size, POLLOUT, until_ms);
  }
  bool hear_all(void* bytes, std::size_t size) noexcept {
    const auto move = [this, bytes](std::size_t from, std::size_t count) {
      return recv(descriptor, static_cast<char*>(bytes) + from, count, 0);
    };
    return move_all(move, size, POLLIN, ballot.until_ms);
  }

  /// The ballot's vote under the key, with what goes along with it.
  bool send_vote() noexcept {
    Vote sent = ballot.vote;
    const bool has_body = exchange->told != nullptr && sent.kind == VoteKind::kVote;
    if (!has_body) sent.body_bytes = 0;
    sent.body_digest = siphash(arbiter.key, exchange->told, sent.body_bytes);
    sent.mac = mac_of(arbiter.key, sent);
    // Of a body that takes longer than patience only a part is sent, and it ends there.
    const std::uint64_t until_ms = has_body ? ballot.until_ms : monotonic_ms() + limits.ask_ms;
    return send_all(&sent, sizeof sent, until_ms) &&
           send_all(exchange->told, sent.body_bytes, until_ms);
  }

  /// Hears a reply that is under the key, and that this rank can use; with what follows it.
  bool listen() noexcept {
    Reply reply;
    if (!hear_all(&reply, sizeof reply) || !is_sound(arbiter.key, reply, ballot.vote)) return false;
    exchange->heard = reply.kind;
    const bool is_proposal = reply.kind == ReplyKind::kStillThere;
    if (reply.body_bytes > 0) {
      const bool is_wanted = is_proposal && exchange->body != nullptr;
      if (!is_wanted || !hear_all(exchange->body, reply.body_bytes) ||
          reply.body_digest != siphash(arbiter.key, exchange->body, reply.body_bytes)) {
        return false;
      }
    }
    if (is_proposal && !ballot.has_confirmed()) {  // else it is said twice
      exchange->proposal = reply;
      if (exchange->accepts != nullptr && !exchange->accepts(exchange->user, *exchange)) {
        return false;
      }
    }
    ballot.hear(reply, monotonic_ms());
    return true;
  }
};

/// Agrees with the other ranks of `vote.round`. `patience_ms`: see Ballot.
inline Verdict agree_by_arbiter(const Arbiter& arbiter, const Vote& vote, const Limits& limits,
                                std::uint64_t patience_ms, Exchange* exchange) noexcept {
  const Ballot ballot(vote, limits, patience_ms, monotonic_ms());
  return Caller{arbiter, limits, exchange, ballot}.agree();
}

}  // namespace dynamiccl
