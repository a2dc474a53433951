// The arbiter's part in all rounds: a state machine without sockets, clocks or threads. It lives in
// the arbiter's worker (arbiter.cpp), never in a process of the job.
//
// A round collects the votes of all ranks. If they are equal it asks all of them whether they are
// still there; when the last one has confirmed, the table is written into the log, and then sent to
// all. In any other case, and at the time limit, which starts with the first vote, the decision is
// abstain, for all ranks and for any that come later.
//
// A worker that was killed is replaced by one that has read the log (`restore`). A round in the log
// is answered Table; a recall of one that is not, Abstain, for good: nobody was sent the table,
// since it is logged before.
//
// A decision is kept until all ranks of the communicator have voted in a later round, which is
// their acknowledgement; else for the job.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>

#include "agree/vote.h"

namespace dynamiccl {

/// A connection, by a number that is not used again.
using Connection = std::uint64_t;

/// A decided table, as it lies in the log: each communicator's latest.
struct Logged {
  RoundKey round;
  std::uint64_t question = 0;
  std::uint32_t num_ranks = 0;
  std::uint8_t zero[28] = {};
};
static_assert(sizeof(Logged) == 64, "none crosses a page: a write of one is whole, or is not");

/// What a worker does for its rounds.
class Outlet {
 public:
  virtual ~Outlet() = default;
  /// Whether it is in the log, in place of the communicator's latest: else it may not be sent.
  virtual bool log(const Logged& table) = 0;
  virtual void send(Connection to, const Reply& reply) = 0;
  /// What to ask all ranks: change, next stop, span, body. Null, or why nothing is.
  virtual const char* propose(const Vote& first, Reply* question) = 0;
  /// A random number, never 0.
  virtual std::uint64_t draw() = 0;
  virtual void decided(const RoundKey& round, std::uint32_t num_ranks, const Reply& reply) = 0;
};

class Rounds {
 public:
  Rounds(std::uint64_t job, const Limits& limits) : job_(job), limits_(limits) {}

  /// What an earlier worker logged. Before anything else.
  void restore(const Logged& table);
  void hear(Connection from, const Vote& vote, std::uint64_t now_ms, Outlet* outlet);
  /// A connection has ended.
  void gone(Connection connection, Outlet* outlet);
  /// Ends rounds at their limit. Returns when to call it again.
  std::uint64_t look_at_clock(std::uint64_t now_ms, Outlet* outlet);

 private:
  friend struct Explored;  // the explorer, which tells states apart

  enum class State : std::uint8_t { kOpen, kAsking, kTable, kAbstain };
  struct Round {
    bool is_decided() const { return state == State::kTable || state == State::kAbstain; }

    State state = State::kOpen;
    Vote first;
    std::uint64_t ends_ms = 0, question = 0;
    std::uint32_t num_confirmed = 0;
    // Until it is decided: whether each voter has confirmed, by nonce, and the connections of all
    // of them. Of several of one voter nobody can tell which one it hears.
    std::map<std::uint64_t, bool> voters;
    std::map<Connection, std::uint64_t> connections;
    std::string reason;
  };
  struct Key {
    std::uint64_t comm, number;
    bool operator<(const Key& other) const {
      return comm != other.comm ? comm < other.comm : number < other.number;
    }
  };

  void bind(Connection connection, const Key& key, Round* round, std::uint64_t nonce);
  void vote(Connection from, const Vote& vote, std::uint64_t now_ms, Outlet* outlet);
  void confirm(Connection from, const Vote& vote, Outlet* outlet);
  void decide(const Key& key, State state, const std::string& reason, Outlet* outlet);
  void forget_before(const Key& key);

  std::uint64_t job_;
  Limits limits_;
  std::map<Key, Round> rounds_;
  std::set<Key> open_;  // not decided: few, where a long job has left thousands that are
  std::map<Connection, Key> bound_;  // the round that a connection belongs to, while it is open
};

}  // namespace dynamiccl
