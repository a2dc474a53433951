// Implementation of rounds.h.
#include "agree/rounds.h"

#include <algorithm>
#include <cstdio>

namespace dynamiccl {
namespace {

/// What must be equal at a stop: the calls before it, and which one it is.
constexpr const char* kFieldNamesAtStop[] = {"calls, simulations or captures", "number of calls"};

std::string name_of(const Vote& vote) {
  return vote.rank >= 0 ? "rank " + std::to_string(vote.rank) : std::string("a rank");
}

Reply make_reply(ReplyKind kind, const std::string& reason) {
  Reply reply;
  reply.kind = kind;
  std::snprintf(reply.reason, sizeof reply.reason, "%s", reason.c_str());
  return reply;
}

/// Why two votes do not agree; empty when they do.
std::string difference(const Vote& first, const Vote& vote) {
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

}  // namespace

void Rounds::restore(const Logged& table) {
  const Key key = {table.round.comm, table.round.number};
  Round& round = rounds_[key];
  round.state = State::kTable;
  round.question = table.question;
  round.first.num_ranks = table.num_ranks;
  forget_before(key);  // all had voted in this one
}

void Rounds::hear(Connection from, const Vote& vote, std::uint64_t now_ms, Outlet* outlet) {
  if (vote.round.job != job_) {
    outlet->send(from, make_reply(ReplyKind::kStranger, "this is the arbiter of another job"));
  } else if (vote.kind == VoteKind::kVote) {
    this->vote(from, vote, now_ms, outlet);
  } else {
    confirm(from, vote, outlet);
  }
}

void Rounds::bind(Connection connection, const Key& key, Round* round, std::uint64_t nonce) {
  bound_[connection] = key;
  round->connections[connection] = nonce;
  round->voters.emplace(nonce, false);
}

void Rounds::vote(Connection from, const Vote& vote, std::uint64_t now_ms, Outlet* outlet) {
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

/// A confirmation, or the recall of a rank that has confirmed: that it arrived is not known to it.
void Rounds::confirm(Connection from, const Vote& vote, Outlet* outlet) {
  const Key key = {vote.round.comm, vote.round.number};
  Round& round = rounds_[key];
  if (round.is_decided()) {
    // Another question is of another communicator of this id, or of a round that a killed worker
    // had begun.
    const bool has_table = round.state == State::kTable;
    const std::string why = has_table ? "another round of this id has the table" : round.reason;
    const bool is_its = has_table && round.question == vote.question;
    outlet->send(from,
                 is_its ? make_reply(ReplyKind::kTable, "") : make_reply(ReplyKind::kAbstain, why));
    return;
  }
  const bool is_known = round.state == State::kAsking && round.question == vote.question &&
                        round.voters.count(vote.nonce) != 0;
  bind(from, key, &round, vote.nonce);
  if (!is_known) {
    return decide(key, State::kAbstain, "the arbiter's worker was lost before it decided", outlet);
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

void Rounds::gone(Connection connection, Outlet* outlet) {
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

std::uint64_t Rounds::look_at_clock(std::uint64_t now_ms, Outlet* outlet) {
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

void Rounds::decide(const Key& key, State state, const std::string& reason, Outlet* outlet) {
  open_.erase(key);
  Round& round = rounds_.at(key);
  round.state = state;
  round.reason = reason;
  const bool has_table = state == State::kTable;
  const Reply reply = make_reply(has_table ? ReplyKind::kTable : ReplyKind::kAbstain, reason);
  outlet->decided({job_, key.comm, key.number}, round.first.num_ranks, reply);
  for (const auto& [connection, nonce] : round.connections) {
    outlet->send(connection, reply);
    bound_.erase(connection);
  }
  round.connections.clear();
  round.voters.clear();
}

/// All ranks of the communicator have voted in round `key`: they know what became of those before.
void Rounds::forget_before(const Key& key) {
  const auto first = rounds_.lower_bound({key.comm, 0}), last = rounds_.find(key);
  for (auto round = first; round != last; ++round) open_.erase(round->first);
  rounds_.erase(first, last);
}

}  // namespace dynamiccl
