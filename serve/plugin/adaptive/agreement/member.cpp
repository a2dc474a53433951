// A member answers only from its own promises and the messages that it received.
#include "adaptive/agreement/member.h"

namespace dynamiccl {

const char* words_of(Reason reason) noexcept {
  switch (reason) {
    case kBusy:
      return "it is still busy with the table before";
    case kTooFarApart:
      return "it is too many calls ahead of the others";
    case kOtherStream:
      return "it has not made, simulated and captured the same calls as rank 0";
    case kUncountable:
      return "its calls overlapped, so that they cannot be counted";
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
    stop_for(message);
    if (proposal_ != 0) promise(now_ns);
  } else if (message.kind == MessageKind::kDecision && from_leader) {
    learn(message);
    if (message.proposal <= decided_) acknowledge(message.proposal);
  } else if (message.kind == MessageKind::kAsk) {
    tell(from_rank, message.proposal);
  } else if (message.kind == MessageKind::kAnswer) {
    learn(message);
  }
}

void Member::tick(std::uint64_t now_ns) noexcept {
  if (proposal_ != 0 && !promised_) promise(now_ns);
  if (promised_ && now_ns >= ask_at_ns_) ask(now_ns);
}

void Member::stop_for(const Message& proposal) noexcept {
  if (proposal.proposal <= decided_) return;
  Message ballot = about(MessageKind::kVote, proposal.proposal);
  ballot.verdict = kReady;
  if (proposal.proposal == proposal_) {  // the leader has not heard it
    return promised_ ? say_yes() : send(0, ballot);
  }
  const bool may_come = proposal_ == 0 && proposal.proposal > refused_;
  const Reason reason = may_come ? consider(proposal) : kBusy;
  if (reason == kNoReason) {
    proposal_ = proposal.proposal;
    at_ = proposal.fixed;
  } else {
    if (may_come) refused_ = proposal.proposal;
    ballot.verdict = kNo;
    ballot.reason = reason;
  }
  send(0, ballot);
}

/// Makes the clock stop unless there is a reason against it.
Reason Member::consider(const Message& proposal) noexcept {
  if (left_) return kLeft;
  if (clock_->is_broken()) return kUncountable;
  std::uint64_t hash;
  if (!clock_->hash_after(proposal.index, &hash)) return kTooFarApart;
  if (hash != proposal.hash) return kOtherStream;
  TableInForce* table =
      proposal.body_bytes == 0
          ? TableInForce::abstaining(proposal.proposal)
          : TableInForce::decode(proposal.body, proposal.body_bytes, proposal.proposal);
  if (table == nullptr) return kBadTable;
  table->is_probe = proposal.span != 0;
  const bool fits = proposal.body_bytes == 0 || (table->decisions.num_ranks == place_.num_ranks &&
                                                 table->decisions.num_nodes == place_.num_nodes);
  if (!fits || !clock_->prepare(proposal.fixed)) {
    table->let_go();
    return fits ? kBusy : kBadTable;
  }
  proposed_ = table;
  return kNoReason;
}

/// Votes yes once the call has come. From then on only the decision releases it.
void Member::promise(std::uint64_t now_ns) noexcept {
  if (promised_ || !clock_->vote(&hash_, &at_)) return;
  promised_ = true;
  ask_at_ns_ = now_ns + timing_.repeat_ns;
  say_yes();
}

void Member::say_yes() noexcept {
  Message ballot = about(MessageKind::kVote, proposal_);
  ballot.verdict = kYes;
  ballot.hash = hash_;
  ballot.index = at_;
  send(0, ballot);
}

/// While nothing is promised: go on, and vote no on this proposal from now on.
void Member::drop_out() noexcept {
  if (proposal_ == 0 || promised_) return;
  clock_->abandon();
  proposed_->let_go();
  proposed_ = nullptr;
  if (refused_ < proposal_) refused_ = proposal_;
  proposal_ = 0;
}

/// The outcome of a proposal, from the leader or a peer.
void Member::learn(const Message& decision) noexcept {
  if (decision.verdict != kYes && decision.verdict != kNo) return;
  const std::uint32_t proposal = decision.proposal;
  if (proposal <= decided_) return;
  if (proposal != proposal_ || !promised_) {
    // Nothing can have been agreed without this rank's vote.
    if (decision.verdict == kYes) return;
    if (proposal == proposal_) drop_out();
    if (proposal_ != 0) return;
    if (refused_ < proposal) refused_ = proposal;
    decided_ = proposal;
    committed_ = false;
    return;
  }
  if (decision.verdict == kYes) {
    clock_->commit(proposed_);
  } else {
    clock_->abandon();
    proposed_->let_go();
  }
  proposed_ = nullptr;
  proposal_ = 0;
  promised_ = false;
  decided_ = proposal;
  committed_ = decision.verdict == kYes;
  if (committed_) decided_at_ = at_;
}

void Member::acknowledge(std::uint32_t proposal) noexcept {
  Message message = about(MessageKind::kAcknowledge, proposal);
  message.index = clock_->waited_ns();
  send(0, message);
}

void Member::tell(std::int32_t peer, std::uint32_t proposal) noexcept {
  Message answer = about(MessageKind::kAnswer, proposal);
  if (proposal == decided_) {
    answer.verdict = committed_ ? kYes : kNo;
  } else if (proposal > decided_ && !(proposal == proposal_ && promised_)) {
    // It cannot be agreed without this rank's vote, which will now never be yes.
    if (proposal == proposal_) drop_out();
    if (refused_ < proposal) refused_ = proposal;
    answer.verdict = kNo;
  }
  send(peer, answer);
}

void Member::ask(std::uint64_t now_ns) noexcept {
  ask_at_ns_ = now_ns + timing_.repeat_ns;
  say_yes();  // should the leader not have heard it
  const Message question = about(MessageKind::kAsk, proposal_);
  // Only a few peers: all of a thousand ranks may be asking at once, and each passes on what it
  // learns. Their addresses are known (service/transport.cpp, tell_peers).
  for (std::int64_t step = 1; step < place_.num_ranks; step *= 2) {
    send(static_cast<std::int32_t>((place_.rank + step) % place_.num_ranks), question);
  }
}

}  // namespace dynamiccl
