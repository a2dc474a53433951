// A rank's vote over TCP: drives a Ballot with blocking calls that have deadlines; no thread, and
// no name server.
#pragma once

#include <sys/socket.h>

#include <atomic>

#include "agree/seal.h"

namespace dynamiccl {

/// The job's arbiter, as the wrapper found it.
struct Arbiter {
  sockaddr_storage address = {};
  socklen_t size = 0;
  Key key;
};

/// Takes an address such as "1.2.3.4:PORT" or "[IPV6]:PORT"; false where the text is none.
bool parse_address(const char* text, Arbiter* arbiter) noexcept;

/// What the ranks of a round and the arbiter tell each other. The first is all that `init` needs.
struct Exchange {
  /// What was said in the end, or why there was no answer; but for kTable.
  char reason[sizeof Reply::reason] = "";
  Reply proposal;              // what was confirmed
  const void* told = nullptr;  // `vote.body_bytes` that follow the vote
  /// What came with the proposal, kMostBodyBytes.
  std::uint8_t* body = nullptr;
  /// Whether this rank can use it; all that may fail. Asked before it confirms.
  bool (*accepts)(void* user, const Exchange& exchange) = nullptr;
  void* user = nullptr;
  /// Set by another thread: the communicator is being aborted.
  const std::atomic<bool>* leaves = nullptr;
};

/// Agrees with the other ranks of `vote.round`. `patience_ms`: see Ballot.
Verdict agree_by_arbiter(const Arbiter& arbiter, const Vote& vote, const Limits& limits,
                         std::uint64_t patience_ms, Exchange* exchange) noexcept;

}  // namespace dynamiccl
