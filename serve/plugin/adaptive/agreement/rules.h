// Shared by leader and members of a communicator: verdicts, reasons, time limits.
//
// The protocol, for each proposal p = 1, 2, ... (one after the other):
//
//   leader                                   member (the leader's own rank is one as well)
//   kPoll p                       ->
//                                 <-         kReport p, calls answered so far
//   kPropose p, table, call A     ->         compares its stream's hash after X calls; will stop at
//     ahead of all reports,       <-         kVote p: ready, or no
//     (X, hash after X calls)
//                                            ... call A comes, and waits ...
//                                 <-         kVote p: yes, with the hash after A - 1 calls
//   kDecision p: from A on,       ->
//     or nothing                  <-         kAcknowledge p
//
// Commit takes the yes of every rank, each from inside its call A, and all with one hash: so all
// ranks have made the same A - 1 calls, and A is the same call everywhere. A promise given earlier
// would not do: until A a rank may count one call more than the others (ncclGroupSimulateEnd), or
// capture calls that the others make, and nobody would know in time. What NCCL tells of captures
// and launches counts in the hash (marks.h), and A is the first call from the proposed one on that
// begins a group: there a rank that has simulated one stands with another hash.
//
// In a job whose ranks go together that wait is as long as they are apart. Where they do not (a
// call of this rank on another communicator may have to come first), the leader calls the proposal
// off as soon as a rank has waited for Timing::patience_ns, and all go on as before.
//
// Until its yes a rank may drop out. Then it asks the leader and its peers (kAsk): one that knows
// the decision tells it; one that has not said yes promises never to (so there can be no commit);
// if all have said yes and only a lost leader knows, the call waits for a bounded time, and then
// fails the communicator as a lost link would.
//
// Messages may be lost, doubled and reordered: both sides repeat what was not answered, and each
// message says all that it needs.
#pragma once

#include <cstdint>

#include "adaptive/wire/message.h"

namespace dynamiccl {

enum Verdict : std::uint8_t { kUndecided = 0, kYes = 1, kNo = 2, kReady = 3 };

enum Reason : std::uint8_t {
  kNoReason = 0,
  kBusy,         // the call is past, or another is stopped at; a later one may do
  kTooFarApart,  // the hash is not kept for so long; later ranks may be closer
  kOtherStream,  // the ranks have not made the same calls: there is no common clock
  kUncountable,  // calls overlapped: this rank has no clock
  kBadTable,     // the bytes are no table for this communicator
  kLeft,         // this rank takes no further part
};

/// The reason as text that follows "rank 3: ".
const char* words_of(Reason reason) noexcept;

/// Whether a later proposal may succeed.
inline bool may_pass(Reason reason) noexcept {
  return reason == kNoReason || reason == kBusy || reason == kTooFarApart;
}

struct Timing {
  std::uint64_t repeat_ns = 200'000'000;      // until what was not answered is said again
  std::uint64_t gather_ns = 120'000'000'000;  // until a rank that did not come is given up
  std::uint64_t phase_ns = 10'000'000'000;    // until a poll that nobody answers is called off
  std::uint64_t patience_ns = 20'000'000;     // that a rank waits at a call for the others
  std::uint64_t retry_ns = 100'000'000;       // from a called-off proposal to the next, and longer
  std::uint64_t span_ns = 50'000'000;         // calls of so long lie between reports and A
  std::uint64_t least_span = 32;              // and at least so many
};

/// Output of messages. `send` must copy what it keeps, and deliver nothing before it returns.
struct Outlet {
  void (*send)(void* user, std::int32_t to_rank, const Message& message);
  void* user;
};

}  // namespace dynamiccl
