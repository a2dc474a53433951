// The leader of a job's communicators in mode adaptive: what is proposed at a stop, and when the
// next one comes. It lives in the arbiter's worker and may be lost with it at any time: ranks hold
// what they use, and tell it at the next stop.
//
//   DYNAMICCL_KILL_FILE        while it is there NCCL's own choice stands, from the next stop on.
//   DYNAMICCL_LOOK_INTERVAL_S  about so many seconds from one stop to the next. Default 1; more
//                              where stops take more than DYNAMICCL_STOP_PERCENT.
//   DYNAMICCL_STOP_PERCENT     share of time that calls may wait at stops. Default 0.1.
//   DYNAMICCL_PROBE_CALLS      calls between two probes of NCCL's own choice. Default 6400; 0:
//   none.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <string>

#include "agree/told.h"
#include "agree/vote.h"

namespace dynamiccl {

class Leader {
 public:
  Leader();

  /// The body of a vote, before the round is decided.
  void hear(const Vote& vote, const std::string& body);
  /// All ranks have voted. Null, with what they are asked to confirm; or why they get nothing.
  const char* propose(const Vote& first, Reply* question);
  /// They have confirmed it, or not.
  void decided(const RoundKey& round, bool is_agreed);

 private:
  struct Group {
    Told latest;                                           // the longest waits of any rank
    std::uint64_t calls = 0, lived_ns = 0, waited_ns = 0;  // at the stop before
    std::uint64_t probed_at = 0;                           // its call
    InForce proposed = InForce::kFirstTable;
  };

  [[noreturn]] void look();

  std::string kill_file_;
  std::atomic<int> kill_file_seen_{0};  // -1: not known
  std::uint64_t look_ns_;
  std::uint64_t probe_calls_;
  double stop_share_;
  std::map<std::uint64_t, Group> groups_;
};

}  // namespace dynamiccl
