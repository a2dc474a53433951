// The leader of a job's communicators in mode adaptive: what is proposed at a stop, and when the
// next one comes. It lives in the arbiter's worker and may be lost with it at any time: ranks hold
// what they use, and tell it at the next stop.
//
// At each stop, the first of these that applies: NCCL's own choice while a kill file is there; the
// table again after a probe; a new artifact's; without what the guard has withdrawn; the brain's; a
// probe of NCCL's own choice; nothing.
//
//   DYNAMICCL_STOP_PERCENT      share of time that calls may wait at stops. Default 0.1.
//   DYNAMICCL_PROBE_CALLS       calls between two probes. Default 6400; 0: none, and no guard.
//   DYNAMICCL_ADAPT_INTERVAL_S  seconds from one decision of the brain to the next. Default 10.
//   DYNAMICCL_SYSTEMS           what the artifact calls this machine: "23007=b300 22809=b300-old".
// and those of leader_files.h and brain_thread.h.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "agree/told.h"
#include "agree/vote.h"
#include "arbiter/brain_thread.h"
#include "arbiter/guard.h"
#include "arbiter/leader_files.h"

namespace dynamiccl {

class Leader {
 public:
  explicit Leader(std::uint64_t job);

  /// A new communicator gets no table then.
  bool may_see_kill_file() { return files_.kill_file() != 0; }

  /// The body of a vote, before the round is decided.
  void hear(const Vote& vote, const std::string& body);
  /// All ranks have voted. Null, with what they are asked to confirm; or why they get nothing.
  const char* propose(const Vote& first, Reply* question);
  /// The body of what was proposed last.
  const std::vector<std::uint8_t>& body() const { return body_; }
  /// They have confirmed it, or not.
  void decided(const RoundKey& round, bool is_agreed);

 private:
  struct Group {
    explicit Group(std::uint32_t num_ranks) : guard(num_ranks) {}
    Told latest;  // the longest waits of any rank
    std::chrono::steady_clock::time_point heard;
    std::uint64_t calls = 0, lived_ns = 0, waited_ns = 0;  // at the stop before
    std::uint64_t probed_at = 0;                           // the call at which one began
    std::uint64_t next_probe = 0;
    std::uint64_t asked_ns = 0, asked_with = 0;  // when the brain was, and with how many times
    std::shared_ptr<const LeaderFiles::Table> artifact;
    /// The table to be in force, with what is withdrawn; none: what the ranks have.
    std::vector<std::uint8_t> table;
    bool is_changed = false;               // and they have not agreed on it yet
    std::vector<std::uint8_t> former;      // what the brain's is to replace
    std::string why;                       // it was
    bool is_off = false, was_off = false;  // as proposed, as agreed
    InForce proposed = InForce::kTable;
    std::uint64_t agreed = 0, failed = 0;
    Guard guard;
  };

  std::string system_of(std::uint32_t nccl_version) const;
  void renew(Group* group, std::uint64_t comm_id, std::uint32_t num_ranks);
  void take_answer(Group* group, std::uint64_t comm_id, std::uint32_t num_ranks);
  void ask_brain(Group* group, std::uint64_t comm_id, std::uint32_t num_ranks);
  void place_next_stop(Group* group, std::uint64_t call, bool begins_probe, Reply* question);
  void write_metrics();
  void forget_silent();

  std::uint64_t job_;
  std::uint64_t probe_calls_, adapt_ns_;
  double stop_share_;
  std::uint64_t written_ns_ = 0;
  LeaderFiles files_;
  BrainThread brain_thread_;
  std::map<std::uint64_t, Group> groups_;
  std::vector<std::uint8_t> body_;
};

}  // namespace dynamiccl
