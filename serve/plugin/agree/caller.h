// A rank's vote over TCP: drives a Ballot with blocking calls that have deadlines; no thread, no
// allocation, no name server.
#pragma once

#include <sys/socket.h>

#include <atomic>

#include "agree/seal.h"

namespace dynamiccl {

/// The arbiter's address as the wrapper found it: "1.2.3.4:PORT" or "[IPV6]:PORT".
struct ArbiterAddress {
  sockaddr_storage address = {};
  socklen_t size = 0;
};

/// False where the text is no such address.
bool parse_address(const char* text, ArbiterAddress* address) noexcept;

/// What goes along with a vote for ranks that stop later.
struct Exchange {
  const void* told = nullptr;  // `vote.body_bytes` that follow the vote
  Reply proposal;              // what was confirmed
  /// What came with the proposal, kMostBodyBytes.
  std::uint8_t* body = nullptr;
  /// Whether this rank can use it; all that may fail. Asked before it confirms.
  bool (*accepts)(void* user, const Exchange& exchange) = nullptr;
  void* user = nullptr;
  /// Set by another thread: the communicator is being aborted.
  const std::atomic<bool>* leaves = nullptr;
};

/// Agrees with the other ranks of `vote.round`. `patience_ms`: how long to wait for an arbiter that
/// does not listen. `reply` is what it said; its reason is set on any outcome but kTable.
Verdict agree_by_arbiter(const ArbiterAddress& address, const Key& key, const Vote& vote,
                         const Limits& limits, std::uint64_t patience_ms, Reply* reply,
                         Exchange* exchange) noexcept;

}  // namespace dynamiccl
