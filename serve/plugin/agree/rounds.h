// The arbiter's part in all rounds: a state machine without sockets, clocks or threads. It lives in
// the arbiter's worker (arbiter.cpp), never in a process of the job.
//
// A round (vote.h) has a time limit, which starts with its first vote. What is no table is abstain,
// for all ranks and for any that come later.
//
// A worker that was killed is replaced by one that has read the log (`restore`). A round in the log
// is answered Table; a recall of one that is not, Abstain, for good: nobody was sent the table,
// since it is logged before.
//
// A decision is kept until all ranks of the communicator have voted in a later round, which is
// their acknowledgement; else for the job.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
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
  virtual void decided(const RoundKey& round, bool has_table) = 0;
};

class Rounds {
 public:
  Rounds(std::uint64_t job, const Limits& limits) : job_(job), limits_(limits) {}

  /// What an earlier worker logged. Before anything else.
  void restore(const Logged& table) {
    const Key key = {table.round.comm, table.round.number};
    Round& round = rounds_[key];
    round.state = State::kTable;
    round.question = table.question;
    round.first.num_ranks = table.num_ranks;
    forget_before(key);  // all had voted in this one
  }

  void hear(Connection from, const Vote& vote, std::uint64_t now_ms, Outlet* outlet) {
    if (vote.round.job != job_) {
      outlet->send(from, make_reply(ReplyKind::kStranger, "this is the arbiter of another job"));
    } else if (vote.kind == VoteKind::kVote) {
      this->vote(from, vote, now_ms, outlet);
    } else {
      confirm(from, vote, outlet);
    }
  }

  /// A connection has ended.
  void gone(Connection connection, Outlet* outlet) {
    const auto bound = bound_.find(connection);
    if (bound == bound_.end()) return;
    const Key key = bound->second;
    bound_.erase(bound);
    const auto found = rounds_.find(key);
    // Its round may have been forgotten, and begun anew.
    if (found == rounds_.end() || found->second.connections.count(connection) == 0) return;
    Round& round = found->second;
    const bool has_confirmed = round.voters[round.connections[connection]];
    round.connections.erase(connection);
    // One that has confirmed asks again; any other abstains by itself.
    if (!has_confirmed) decide(key, State::kAbstain, "a rank left", outlet);
  }

  /// Ends rounds at their limit. Returns when to call it again.
  std::uint64_t look_at_clock(std::uint64_t now_ms, Outlet* outlet) {
    std::uint64_t next_ms = ~std::uint64_t{0};
    for (auto next = open_.begin(); next != open_.end();) {
      const Key key = *next++;  // decided, it is no longer among them
      const Round& round = rounds_.at(key);
      if (now_ms < round.ends_ms) {
        next_ms = std::min(next_ms, round.ends_ms);
        continue;
      }
      const bool is_open = round.state == State::kOpen;
      const std::size_t here = is_open ? round.voters.size() : std::size_t{round.num_confirmed};
      decide(key, State::kAbstain,
             std::to_string(here) + " of " + std::to_string(round.first.num_ranks) +
                 (is_open ? " ranks voted in time" : " ranks confirmed in time"),
             outlet);
    }
    return next_ms;
  }

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

  /// What must be equal at a stop: the calls before it, and which one it is.
  static constexpr const char* kFieldNamesAtStop[] = {"calls, simulations or captures",
                                                      "number of calls"};

  static std::string name_of(const Vote& vote) {
    return vote.rank >= 0 ? "rank " + std::to_string(vote.rank) : std::string("a rank");
  }

  static Reply make_reply(ReplyKind kind, const std::string& reason) {
    Reply reply;
    reply.kind = kind;
    std::snprintf(reply.reason, sizeof reply.reason, "%s", reason.c_str());
    return reply;
  }

  /// Why two votes do not agree; empty when they do.
  static std::string difference(const Vote& first, const Vote& vote) {
    if (vote.problem[0] != '\0') return name_of(vote) + ": " + vote.problem;
    if (first.num_ranks != vote.num_ranks) return name_of(vote) + " counts other ranks";
    for (std::size_t i = 0; i < kNumFields; ++i) {
      if (first.fields[i] == vote.fields[i]) continue;
      const char* name =
          vote.round.number == 0 ? kFieldNames[i] : kFieldNamesAtStop[std::min<std::size_t>(i, 1)];
      return name_of(vote) + " differs from " + name_of(first) + " in " + name;
    }
    return "";
  }

  void bind(Connection connection, const Key& key, Round* round, std::uint64_t nonce) {
    bound_[connection] = key;
    round->connections[connection] = nonce;
    round->voters.emplace(nonce, false);
  }

  void vote(Connection from, const Vote& vote, std::uint64_t now_ms, Outlet* outlet) {
    const Key key = {vote.round.comm, vote.round.number};
    Round& round = rounds_[key];
    if (round.is_decided()) {
      const bool has_table = round.state == State::kTable;
      const std::string why = "a communicator of this id has its table already";
      outlet->send(from, make_reply(ReplyKind::kAbstain, has_table ? why : round.reason));
      return;
    }
    if (round.voters.empty()) {
      round.first = vote;
      round.ends_ms = now_ms + (key.number == 0 ? vote_limit_ms(limits_, vote.num_ranks)
                                                : limits_.stop_ms + vote.num_ranks);
      open_.insert(key);
    }
    bind(from, key, &round, vote.nonce);
    std::string why = difference(round.first, vote);
    if (round.state == State::kAsking || round.voters.size() > round.first.num_ranks) {
      why = "more ranks voted than the communicator has";
    }
    if (!why.empty()) return decide(key, State::kAbstain, why, outlet);
    if (round.voters.size() < round.first.num_ranks) return;
    forget_before(key);
    round.state = State::kAsking;
    round.question = outlet->draw();
    Reply reply = make_reply(ReplyKind::kStillThere, "");
    reply.question = round.question;
    const char* why_not = outlet->propose(round.first, &reply);
    if (why_not != nullptr) return decide(key, State::kAbstain, why_not, outlet);
    for (const auto& [connection, nonce] : round.connections) outlet->send(connection, reply);
  }

  /// A confirmation, or the recall of a rank that has confirmed: that it arrived is not known to
  /// it.
  void confirm(Connection from, const Vote& vote, Outlet* outlet) {
    const Key key = {vote.round.comm, vote.round.number};
    Round& round = rounds_[key];
    if (round.is_decided()) {
      // Another question is of another communicator of this id, or of a round that a killed worker
      // had begun.
      const bool has_table = round.state == State::kTable;
      const std::string why = has_table ? "another round of this id has the table" : round.reason;
      const bool is_its = has_table && round.question == vote.question;
      outlet->send(
          from, is_its ? make_reply(ReplyKind::kTable, "") : make_reply(ReplyKind::kAbstain, why));
      return;
    }
    const bool is_known = round.state == State::kAsking && round.question == vote.question &&
                          round.voters.count(vote.nonce) != 0;
    bind(from, key, &round, vote.nonce);
    if (!is_known) {
      return decide(key, State::kAbstain, "the arbiter's worker was lost before it decided",
                    outlet);
    }
    bool& has_confirmed = round.voters[vote.nonce];
    if (has_confirmed) return;
    has_confirmed = true;
    ++round.num_confirmed;
    if (round.num_confirmed < round.first.num_ranks) return;
    const Logged table = {{job_, key.comm, key.number}, round.question, round.first.num_ranks, {}};
    if (outlet->log(table)) {
      decide(key, State::kTable, "", outlet);
    } else {
      decide(key, State::kAbstain, "a kill file has come, or the arbiter cannot write its log",
             outlet);
    }
  }

  void decide(const Key& key, State state, const std::string& reason, Outlet* outlet) {
    open_.erase(key);
    Round& round = rounds_.at(key);
    round.state = state;
    round.reason = reason;
    const bool has_table = state == State::kTable;
    const Reply reply = make_reply(has_table ? ReplyKind::kTable : ReplyKind::kAbstain, reason);
    outlet->decided({job_, key.comm, key.number}, has_table);
    for (const auto& [connection, nonce] : round.connections) {
      outlet->send(connection, reply);
      bound_.erase(connection);
    }
    round.connections.clear();
    round.voters.clear();
  }

  /// All ranks of the communicator have voted in round `key`: they know what became of those
  /// before.
  void forget_before(const Key& key) {
    const auto first = rounds_.lower_bound({key.comm, 0}), last = rounds_.find(key);
    for (auto round = first; round != last; ++round) open_.erase(round->first);
    rounds_.erase(first, last);
  }

  std::uint64_t job_;
  Limits limits_;
  std::map<Key, Round> rounds_;
  std::set<Key> open_;  // not decided: few, where a long job has left thousands that are
  std::map<Connection, Key> bound_;  // the round that a connection belongs to, while it is open
};

}  // namespace dynamiccl
