// What leader and members of a communicator share: verdicts, reasons, and how long things may take.
//
// The protocol, for each proposal p = 1, 2, ... (one after the other):
//
//   leader                                   member (the leader's own rank is one as well)
//   kPoll p                       ->
//                                 <-         kReport p, calls answered so far
//   kPropose p, table, (X, hash   ->         compares its stream's hash after X calls; promises not
//    after X calls), span H                  to go past call c + H undecided
//                                 <-         kVote p: yes from call c, or no
//   kDecision p: at call A        ->         stages: call A is the first with the new table
//    >= every c + H, or nothing   <-         kAcknowledge p, again once it is past A
//
// X is the smallest of the reports, so every member is past it and votes at once, however far the
// ranks' hosts are apart: a vote that waited for the host could wait for a call of this rank on
// another communicator. A member that voted and hears nothing asks its peers (kAsk): one that knows
// the decision tells it; one that has not voted promises never to (so there can be no commit); if
// all have voted and only a lost leader knows, it stops at its horizon for a bounded time, and then
// fails the communicator as a lost link would.
//
// Messages may be lost, doubled and reordered: both sides repeat what was not answered, and each
// message says all that it needs.
#pragma once

#include <cstdint>

#include "wire/message.h"

namespace dynamiccl {

enum Verdict : std::uint8_t { kUndecided = 0, kYes = 1, kNo = 2 };

enum Reason : std::uint8_t {
  kNoReason = 0,
  kBusy,         // the clock cannot promise now; later it may
  kTooFarApart,  // the hash is not kept for so long; later ranks may be closer
  kOtherStream,  // the ranks have not made the same calls: there is no common clock
  kUncountable,  // calls overlapped: this rank has no clock
  kHoldExpired,  // the call that was held for the agreement went on
  kBadTable,     // the bytes are no table for this communicator
  kLeft,         // this rank takes no further part
};

/// Why it is so, in words that follow "rank 3: ".
const char* words_of(Reason reason) noexcept;

/// Whether a later proposal can fare better.
inline bool may_pass(Reason reason) noexcept {
  return reason == kNoReason || reason == kBusy || reason == kTooFarApart;
}

struct Timing {
  std::uint64_t repeat_ns = 200'000'000;      // until what was not answered is said again
  std::uint64_t gather_ns = 120'000'000'000;  // until a rank that did not come is given up
  std::uint64_t phase_ns = 10'000'000'000;    // until a poll or vote is called off
  std::uint64_t retry_ns = 1'000'000'000;     // from a called-off proposal to the next
  std::uint64_t span_ns = 250'000'000;        // calls of so long lie between votes and switch
  std::uint64_t least_span = 64;              // and at least so many
};

/// Where messages go. `send` must copy what it keeps, and deliver nothing before it returns.
struct Outlet {
  void (*send)(void* user, std::int32_t to_rank, const Message& message);
  void* user;
};

}  // namespace dynamiccl
