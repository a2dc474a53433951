// A small world for the agreement in `init`: ranks and a coordinator as they are, a network and
// hosts as they may be. tuner_play.h plays it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "tuner/coordinator.h"
#include "tuner/voter.h"

namespace dynamiccl {

/// Coordinator's members, for the memory of states that have been seen.
struct Explored {
  static void describe(const Coordinator& coordinator, std::uint64_t now_ms, std::string* text);
  static int num_with_votes(const Coordinator& coordinator) { return coordinator.num_with_votes_; }
  static void describe(const Voter& voter, std::uint64_t now_ms, std::string* text) {
    *text += std::to_string(voter.ends_at_ms_ - now_ms) + ",";
    *text += std::to_string(voter.silent_until_ms_ - now_ms) + ",";
    *text += std::to_string(std::min(voter.num_in_vain_, 3)) + (voter.has_ever_voted_ ? "v" : ",");
  }
};

}  // namespace dynamiccl

// The rounds are of a type that coordinator.cpp keeps to itself.
#include "tuner/coordinator.cpp"  // NOLINT

namespace dynamiccl {

void Explored::describe(const Coordinator& coordinator, std::uint64_t now_ms, std::string* text) {
  const auto put = [text](std::uint64_t number) { *text += std::to_string(number) + ","; };
  put(coordinator.incarnation_);
  put(static_cast<std::uint64_t>(coordinator.num_timeouts_));
  put(now_ms - coordinator.looked_at_ms_);
  put((coordinator.ids_repeat_ ? 1U : 0U) + (coordinator.is_retired_ ? 2U : 0U));
  for (const auto* at = coordinator.latest_; at != nullptr; at = at->earlier) {
    const auto& round = *at;
    put(round.comm_id);
    put(static_cast<std::uint64_t>(round.state));
    put(now_ms - round.first_vote_ms);
    put(round.question);
    for (std::uint32_t i = 0; round.votes != nullptr && i < round.num_slots; ++i) {
      const auto& vote = round.votes[i];
      put(vote.nonce);
      put(vote.confirmed ? 1U : 0U);
    }
  }
}

}  // namespace dynamiccl

namespace {

using namespace dynamiccl;

/// How often each thing may happen in one schedule.
struct Budget {
  int lost = 0, doubled = 0, given_up = 0, aborted = 0, crashed = 0, stalls = 0, stopped = 0;
};

/// What the second communicator of a world is.
enum class Second {
  kNone,
  kOther,  // with an id of its own
  kSplit,  // with the same id, and all ranks of both know that ids repeat
  kGrown,  // with the same id, and of each the first rank alone knows; the coordinator was told
};

struct World {
  int num_ranks = 2;
  int differs = -1;  // this rank votes with something else
  int objects = -1;  // this one has a problem of its own
  int never_comes = -1;
  Budget budget;
  /// A question and its answer are one step, or one whose answer is lost: so the worlds where
  /// coordinators are lost are explored to their end.
  bool whole = false;
  Second second = Second::kNone;
  bool late = false;  // the last rank of the first one comes when it likes
};

enum class Kind {
  kSend,
  kToCoordinator,
  kToRank,
  kAsk,
  kAskInVain,
  kLose,
  kDouble,
  kGiveUp,
  kAbort,
  kCrash,
  kStall,
  kStop,     // this rank and its clock stand still, for longer than anybody waits for anything
  kSuspend,  // this rank alone: its clock goes on, and what it asked has timed out
  kArrive,   // the late rank
};
struct Action {
  Kind kind;
  int index;
};

struct Flight {
  bool is_answer;
  int init;
  int exchange;  // which request of that init it belongs to: an answer comes on its connection
  Request request;
  Answer answer;
};

struct Init {
  int rank, instance;
  int comm;
  Voter voter;
  std::uint64_t behind_ms = 0;  // how long its clock stood still
  int exchange = 0;             // of the request that waits for its answer; 0: none
  bool aborted = false;
  Outcome outcome() const { return voter.outcome(); }
};

}  // namespace
