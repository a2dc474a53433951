// What the objects of the agreement hold, as one number: to know a state again.
#pragma once

#include <algorithm>
#include <cstdint>

#include "adaptive/agreement/leader.h"
#include "adaptive/agreement/member.h"

namespace dynamiccl {

/// Reads what the explored objects hold, to know a state again.
struct Inspect {
  static void mix(std::uint64_t* digest, std::uint64_t value) {
    *digest = (*digest ^ value) * 0x9e3779b97f4a7c15U;
    *digest ^= *digest >> 29;
  }
  static void add(std::uint64_t* d, const Clock& clock) {
    mix(d, clock.begun_);
    mix(d, clock.ended_);
    mix(d, clock.hash_);
    mix(d, clock.in_force_.load()->number);
    mix(d, clock.staged_ != nullptr ? clock.staged_->number : 99);
    mix(d, clock.marks_->bits);
    mix(d, clock.stop_at_);
    mix(d, clock.is_closed_ | clock.failed_ << 1 | clock.promised_ << 2 | clock.waiting_ << 3);
  }
  static void add(std::uint64_t* d, const Member& member) {
    mix(d, member.left_ | member.committed_ << 1 | member.promised_ << 2);
    mix(d, member.refused_);
    mix(d, member.proposal_);
    if (member.proposal_ != 0) mix(d, member.at_);
    mix(d, member.decided_);
    mix(d, member.decided_at_);
  }
  static void add(std::uint64_t* d, const Leader& leader) {
    mix(d, static_cast<std::uint64_t>(leader.state_));
    mix(d, leader.proposal_);
    mix(d, leader.wanted_ | leader.commit_ << 1 | leader.for_good_ << 2);
    mix(d, std::min(leader.called_off_, 3U));
    mix(d, leader.at_);
    mix(d, leader.first_yes_ns_ != 0);
    mix(d, leader.compare_at_);
    for (int i = 0; i < leader.place_.num_ranks; ++i) {
      const Leader::Rank& rank = leader.ranks_[i];
      mix(d, rank.here | rank.answered << 1 | rank.is_ready << 2);
      mix(d, rank.calls);
    }
  }
};

}  // namespace dynamiccl
