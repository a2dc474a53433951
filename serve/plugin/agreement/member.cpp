// A member never guesses: it answers from what it has promised and what it was told.
#include "agreement/member.h"

namespace dynamiccl {

const char* words_of(Reason reason) noexcept {
  switch (reason) {
    case kBusy:
      return "it is still busy with the table before";
    case kTooFarApart:
      return "it is too many calls ahead of the others";
    case kOtherStream:
      return "it has not made the same calls";
    case kUncountable:
      return "its calls overlapped, so that they cannot be counted";
    case kHoldExpired:
      return "its call DYNAMICCL_ACTIVATE_AT would not wait any longer";
    case kBadTable:
      return "the table does not fit it";
    case kLeft:
      return "it takes no further part";
    case kNoReason:
      break;
  }
  return "it gave no reason";
}

Member::Member(const Place& place, Clock* clock, const Outlet& outlet,
               const Timing& timing) noexcept
    : place_(place), clock_(clock), outlet_(outlet), timing_(timing) {}

Member::~Member() {
  if (proposed_ != nullptr) proposed_->let_go();
}

Message Member::about(MessageKind kind, std::uint32_t proposal) const noexcept {
  Message message{};
  message.kind = kind;
  message.rank = place_.rank;
  message.comm_id = place_.comm_id;
  message.proposal = proposal;
  return message;
}

void Member::receive(std::int32_t from_rank, const Message& message,
                     std::uint64_t now_ns) noexcept {
  const bool from_leader = from_rank == 0;
  if (message.kind == MessageKind::kPoll && from_leader) {
    Message report = about(MessageKind::kReport, message.proposal);
    report.index = clock_->calls();
    send(0, report);
  } else if (message.kind == MessageKind::kPropose && from_leader) {
    vote(message, now_ns);
  } else if (message.kind == MessageKind::kDecision && from_leader) {
    learn(message);
    if (message.proposal == decided_) acknowledge();
  } else if (message.kind == MessageKind::kAsk) {
    tell(from_rank, message.proposal);
  } else if (message.kind == MessageKind::kAnswer) {
    learn(message);
  }
}

void Member::tick(std::uint64_t now_ns) noexcept {
  if (voted_ != 0 && now_ns >= ask_at_ns_) ask(now_ns);
  if (committed_ && !told_past_ && is_past()) acknowledge();
}

void Member::vote(const Message& proposal, std::uint64_t now_ns) noexcept {
  if (proposal.proposal <= decided_) return;
  Message ballot = about(MessageKind::kVote, proposal.proposal);
  if (proposal.proposal == voted_) {  // the leader has not heard it
    ballot.verdict = kYes;
    ballot.index = voted_at_;
    return send(0, ballot);
  }
  Reason reason = kNoReason;
  if (voted_ != 0) {
    reason = kBusy;
  } else if (proposal.proposal <= refused_) {
    reason = kBusy;
  } else {
    reason = consider(proposal);
  }
  if (reason == kNoReason) {
    voted_ = proposal.proposal;
    voted_span_ = proposal.span;
    voted_fixed_ = proposal.fixed;
    ask_at_ns_ = now_ns + timing_.repeat_ns;
    ballot.verdict = kYes;
    ballot.index = voted_at_;
  } else {
    if (voted_ == 0 && refused_ < proposal.proposal) refused_ = proposal.proposal;
    ballot.verdict = kNo;
    ballot.reason = reason;
  }
  send(0, ballot);
}

/// Votes yes with the clock when there is no reason against it.
Reason Member::consider(const Message& proposal) noexcept {
  if (left_) return kLeft;
  if (clock_->is_broken()) return kUncountable;
  if (clock_->hold_expired()) return kHoldExpired;
  std::uint64_t hash;
  if (!clock_->hash_after(proposal.index, &hash)) return kTooFarApart;
  if (hash != proposal.hash) return kOtherStream;
  TableInForce* table =
      proposal.body_bytes == 0
          ? TableInForce::abstaining(proposal.proposal)
          : TableInForce::decode(proposal.body, proposal.body_bytes, proposal.proposal);
  if (table == nullptr) return kBadTable;
  const bool fits = proposal.body_bytes == 0 || (table->decisions.num_ranks == place_.num_ranks &&
                                                 table->decisions.num_nodes == place_.num_nodes);
  if (!fits || !clock_->vote(proposal.span, proposal.fixed, &voted_at_)) {
    table->let_go();
    return fits ? kBusy : kBadTable;
  }
  proposed_ = table;
  return kNoReason;
}

/// The outcome of a proposal, from the leader or a peer.
void Member::learn(const Message& decision) noexcept {
  if (decision.verdict != kYes && decision.verdict != kNo) return;
  const std::uint32_t proposal = decision.proposal;
  if (proposal <= decided_) return;
  if (proposal != voted_) {
    // Nothing can have been agreed without this rank; so it may forget the proposal.
    if (decision.verdict == kNo && voted_ == 0) {
      if (refused_ < proposal) refused_ = proposal;
      decided_ = proposal;
      committed_ = false;
    }
    return;
  }
  if (decision.verdict == kYes) {
    const std::uint64_t horizon =
        voted_fixed_ != Clock::kNever ? voted_fixed_ : voted_at_ + voted_span_;
    // No leader of ours decides on a call that a voter may have passed.
    if (decision.index < horizon) return;
    clock_->commit(proposed_, decision.index, decision.span);
  } else {
    clock_->abandon();
    proposed_->let_go();
  }
  proposed_ = nullptr;
  voted_ = 0;
  decided_ = proposal;
  committed_ = decision.verdict == kYes;
  told_past_ = false;
  decided_at_ = decision.index;
  decided_span_ = decision.span;
}

/// Whether all that was decided has happened.
bool Member::is_past() const noexcept {
  return !committed_ || clock_->calls() >= decided_at_ + decided_span_;
}

void Member::acknowledge() noexcept {
  Message message = about(MessageKind::kAcknowledge, decided_);
  told_past_ = is_past();
  message.verdict = told_past_ ? kYes : kUndecided;
  send(0, message);
}

void Member::tell(std::int32_t peer, std::uint32_t proposal) noexcept {
  Message answer = about(MessageKind::kAnswer, proposal);
  if (proposal == decided_) {
    answer.verdict = committed_ ? kYes : kNo;
    answer.index = decided_at_;
    answer.span = decided_span_;
  } else if (proposal > decided_ && proposal != voted_) {
    // It cannot be agreed without this rank, and now never will be.
    if (refused_ < proposal) refused_ = proposal;
    answer.verdict = kNo;
  }
  send(peer, answer);
}

void Member::ask(std::uint64_t now_ns) noexcept {
  ask_at_ns_ = now_ns + timing_.repeat_ns;
  const Message question = about(MessageKind::kAsk, voted_);
  // In turns: all of a thousand ranks may be asking at once.
  const std::int32_t others = place_.num_ranks - 1;
  for (std::int32_t i = 0; i < others && i < kAskedAtOnce; ++i) {
    next_peer_ = next_peer_ % others + 1;
    send((place_.rank + next_peer_) % place_.num_ranks, question);
  }
}

}  // namespace dynamiccl
