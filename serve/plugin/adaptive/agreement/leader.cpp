// One proposal at a time: poll, vote, decide, wait for acknowledgements.
#include "adaptive/agreement/leader.h"

#include <algorithm>
#include <cinttypes>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

#include "identity/difference.h"

namespace dynamiccl {
namespace {

constexpr std::uint64_t kMostSpan = 1'000'000;
// After each abandoned proposal the next one comes later, is further ahead of the calls, and waits
// longer: these double at most so many times.
constexpr std::uint32_t kLaterTimes = 9, kFurtherTimes = 6, kMorePatienceTimes = 3;
constexpr std::uint32_t kMostTries = 20;  // in a row; after that the ranks are left alone

}  // namespace

Leader::Leader(const Member::Place& place, Clock* clock, const Outlet& outlet, const Timing& timing,
               Rank* ranks, char* identity) noexcept
    : place_(place),
      clock_(clock),
      outlet_(outlet),
      timing_(timing),
      ranks_(ranks),
      identity_(identity) {}

Leader::~Leader() {
  std::free(ranks_);
  std::free(identity_);
  std::free(table_);
}

Leader* Leader::create(const Member::Place& place, Clock* clock, const char* identity,
                       const Outlet& outlet, const Timing& timing, std::uint64_t now_ns) noexcept {
  auto* ranks =
      static_cast<Rank*>(std::calloc(static_cast<std::size_t>(place.num_ranks), sizeof(Rank)));
  const std::size_t length = std::strlen(identity) + 1;
  auto* text = static_cast<char*>(std::malloc(length));
  void* memory = std::malloc(sizeof(Leader));
  if (ranks == nullptr || text == nullptr || memory == nullptr) {
    std::free(ranks);
    std::free(text);
    std::free(memory);
    return nullptr;
  }
  std::memcpy(text, identity, length);
  auto* leader = new (memory) Leader(place, clock, outlet, timing, ranks, text);
  leader->rate_since_ns_ = now_ns;
  leader->enter(State::kGathering, now_ns);
  return leader;
}

void Leader::destroy(Leader* leader) noexcept {
  if (leader == nullptr) return;
  leader->~Leader();
  std::free(leader);
}

void Leader::note(const char* format, ...) noexcept {
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(reason_, sizeof reason_, format, arguments);
  va_end(arguments);
}

std::int32_t Leader::num_here() const noexcept {
  return static_cast<std::int32_t>(
      std::count_if(ranks_, ranks_ + place_.num_ranks, [](const Rank& rank) { return rank.here; }));
}

std::int32_t Leader::first_missing() const noexcept {
  std::int32_t rank = 0;
  while (rank < place_.num_ranks && ranks_[rank].here) ++rank;
  return rank;
}

bool Leader::all_answered() const noexcept {
  return std::all_of(ranks_, ranks_ + place_.num_ranks,
                     [](const Rank& rank) { return rank.answered; });
}

void Leader::enter(State state, std::uint64_t now_ns) noexcept {
  state_ = state;
  phase_since_ns_ = now_ns;
  said_at_ns_ = now_ns;
  for (std::int32_t i = 0; i < place_.num_ranks; ++i) ranks_[i].answered = false;
  due_ns_ = state == State::kIdle && !wanted_ ? 0 : now_ns + timing_.repeat_ns;
}

bool Leader::propose(const std::uint8_t* table, std::size_t table_bytes, bool is_probe) noexcept {
  const bool busy = state_ == State::kPolling || state_ == State::kVoting;
  if (state_ == State::kEnded || busy || table_bytes > kMaxBodyBytes) return false;
  std::uint8_t* copy = nullptr;
  if (table_bytes > 0) {
    copy = static_cast<std::uint8_t*>(std::malloc(table_bytes));
    if (copy == nullptr) return false;
    std::memcpy(copy, table, table_bytes);
  }
  std::free(table_);
  table_ = copy;
  table_bytes_ = table_bytes;
  is_probe_ = is_probe;
  wanted_ = true;
  if (due_ns_ == 0) due_ns_ = 1;  // at the next tick
  return true;
}

void Leader::receive(std::int32_t from_rank, const Message& message,
                     std::uint64_t now_ns) noexcept {
  if (from_rank < 0 || from_rank >= place_.num_ranks) return;
  Rank& rank = ranks_[from_rank];
  if (message.kind == MessageKind::kHello) {
    hello(from_rank, message);
    if (for_good_) return end(now_ns);
    if (state_ == State::kGathering && num_here() == place_.num_ranks) {
      enter(State::kIdle, now_ns);
      if (wanted_) put_next(now_ns);
    }
    return;
  }
  if (message.proposal != proposal_ || proposal_ == 0) return;
  if (message.kind == MessageKind::kReport && state_ == State::kPolling) {
    rank.calls = message.index;
    rank.answered = true;
    if (all_answered()) ask_for_votes(now_ns);
  } else if (message.kind == MessageKind::kVote && state_ == State::kVoting) {
    count_vote(from_rank, message, now_ns);
  } else if (message.kind == MessageKind::kAcknowledge && state_ == State::kSettling) {
    rank.answered = true;
    waited_ns_ = std::max(waited_ns_, message.index);
    if (!all_answered()) return;
    if (for_good_) return end(now_ns);
    enter(State::kIdle, now_ns);
    if (wanted_ && (commit_ || now_ns >= retry_at_ns_)) put_next(now_ns);
  }
}

void Leader::count_vote(std::int32_t number, const Message& message,
                        std::uint64_t now_ns) noexcept {
  Rank& rank = ranks_[number];
  if (message.verdict == kReady) {
    rank.is_ready = true;
    return;
  }
  if (message.verdict != kYes) {
    const auto reason = static_cast<Reason>(message.reason);
    note("rank %d: %s", number, words_of(reason));
    for_good_ = !may_pass(reason);
    return decide(false, now_ns);
  }
  if (first_yes_ns_ == 0) {
    first_yes_ns_ = now_ns;
    first_yes_rank_ = number;
    hash_ = message.hash;
    stands_at_ = message.index;
  }
  if (message.hash != hash_ || message.index != stands_at_) {
    note("rank %d: it has not made, simulated and captured the same calls as rank %d", number,
         first_yes_rank_);
    for_good_ = true;
    return decide(false, now_ns);
  }
  rank.answered = true;
  if (all_answered()) decide(true, now_ns);
}

void Leader::hello(std::int32_t rank, const Message& message) noexcept {
  if (state_ == State::kEnded) return say(rank);
  if (ranks_[rank].here) return;
  char difference[200];
  if (find_difference(identity_, reinterpret_cast<const char*>(message.body), message.body_bytes,
                      difference)) {
    note("rank %d differs from rank 0: %s", rank, difference);
    for_good_ = true;
    return;
  }
  ranks_[rank].here = true;
}

void Leader::end(std::uint64_t now_ns) noexcept {
  enter(State::kEnded, now_ns);
  wanted_ = false;
  due_ns_ = 0;
  repeat();
}

void Leader::put_next(std::uint64_t now_ns) noexcept {
  wanted_ = false;
  ++proposal_;
  enter(State::kPolling, now_ns);
  repeat();
}

void Leader::ask_for_votes(std::uint64_t now_ns) noexcept {
  std::uint64_t least = ranks_[0].calls;
  for (std::int32_t i = 1; i < place_.num_ranks; ++i) least = std::min(least, ranks_[i].calls);
  compare_at_ = least / Clock::kHashEvery * Clock::kHashEvery;
  if (!clock_->hash_after(compare_at_, &compare_hash_)) {
    note("rank 0: %s", words_of(kTooFarApart));
    return decide(false, now_ns);
  }
  std::uint64_t most = ranks_[0].calls;
  for (std::int32_t i = 1; i < place_.num_ranks; ++i) most = std::max(most, ranks_[i].calls);
  // The further ahead, the more likely that no rank has made the call yet when it receives the
  // proposal; ranks that were past it last time ask for more.
  const auto paced =
      static_cast<std::uint64_t>(calls_per_ns_ * static_cast<double>(timing_.span_ns));
  const std::uint64_t span = std::clamp(paced, timing_.least_span, kMostSpan)
                             << std::min(called_off_, kFurtherTimes);
  at_ = most + span;
  first_yes_ns_ = 0;
  for (std::int32_t i = 0; i < place_.num_ranks; ++i) ranks_[i].is_ready = false;
  enter(State::kVoting, now_ns);
  repeat();
}

void Leader::decide(bool commit, std::uint64_t now_ns) noexcept {
  commit_ = commit;
  if (commit) {
    ++committed_;
    called_off_ = 0;
  } else {
    // Propose the same again, unless another proposal is waiting or no agreement is possible.
    ++called_off_;
    if (called_off_ >= kMostTries) for_good_ = true;
    wanted_ = !for_good_;
    retry_at_ns_ = now_ns + (timing_.retry_ns << std::min(called_off_ - 1, kLaterTimes));
  }
  enter(State::kSettling, now_ns);
  repeat();
}

std::uint64_t Leader::patience_ns() const noexcept {
  return timing_.patience_ns << std::min(called_off_, kMorePatienceTimes);
}

void Leader::measure_rate(std::uint64_t now_ns) noexcept {
  constexpr std::uint64_t kWindowNs = 100'000'000;
  if (now_ns < rate_since_ns_ + kWindowNs) return;
  const std::uint64_t calls = clock_->calls();
  const double rate =
      static_cast<double>(calls - rate_calls_) / static_cast<double>(now_ns - rate_since_ns_);
  calls_per_ns_ = std::max(rate, 0.5 * calls_per_ns_);
  rate_calls_ = calls;
  rate_since_ns_ = now_ns;
}

void Leader::tick(std::uint64_t now_ns) noexcept {
  measure_rate(now_ns);
  const std::uint64_t in_phase_ns = now_ns - phase_since_ns_;
  if (state_ == State::kGathering && in_phase_ns >= timing_.gather_ns) {
    note("rank %d did not take part (%d of %d did)", first_missing(), num_here(), place_.num_ranks);
    for_good_ = true;
    return end(now_ns);
  }
  if (state_ == State::kIdle) {
    due_ns_ = wanted_ ? retry_at_ns_ | 1 : 0;
    if (wanted_ && now_ns >= retry_at_ns_) put_next(now_ns);
    return;
  }
  if (state_ == State::kEnded) return;
  std::int32_t silent = 0;
  while (silent < place_.num_ranks && ranks_[silent].answered) ++silent;
  if (state_ == State::kPolling && in_phase_ns >= timing_.phase_ns) {
    note("rank %d did not answer", silent);
    return decide(false, now_ns);
  }
  if (state_ == State::kVoting && first_yes_ns_ != 0 && now_ns - first_yes_ns_ >= patience_ns()) {
    note("rank %d was not at the same call as the others in time", silent);
    return decide(false, now_ns);
  }
  if (now_ns >= said_at_ns_ + timing_.repeat_ns) {
    said_at_ns_ = now_ns;
    repeat();
  }
  due_ns_ = said_at_ns_ + timing_.repeat_ns;
  if (state_ == State::kVoting && first_yes_ns_ != 0) {
    due_ns_ = std::min(due_ns_, first_yes_ns_ + patience_ns());
  }
}

void Leader::repeat() noexcept {
  for (std::int32_t i = 0; i < place_.num_ranks; ++i) {
    const bool is_ready = state_ == State::kVoting && ranks_[i].is_ready;
    if (!ranks_[i].answered && !is_ready) say(i);
  }
}

/// The message that a rank gets in this state.
void Leader::say(std::int32_t rank) noexcept {
  Message message{};
  message.rank = 0;
  message.comm_id = place_.comm_id;
  message.proposal = proposal_;
  switch (state_) {
    case State::kPolling:
      message.kind = MessageKind::kPoll;
      break;
    case State::kVoting:
      message.kind = MessageKind::kPropose;
      message.index = compare_at_;
      message.hash = compare_hash_;
      message.span = is_probe_ ? 1 : 0;
      message.fixed = at_;
      message.body = table_;
      message.body_bytes = static_cast<std::uint32_t>(table_bytes_);
      break;
    case State::kSettling:
      message.kind = MessageKind::kDecision;
      message.verdict = commit_ ? kYes : kNo;
      break;
    case State::kEnded:
      message.kind = MessageKind::kRefuse;
      message.body = reinterpret_cast<const std::uint8_t*>(reason_);
      message.body_bytes = static_cast<std::uint32_t>(std::strlen(reason_));
      break;
    case State::kGathering:
    case State::kIdle:
      return;
  }
  outlet_.send(outlet_.user, rank, message);
}

}  // namespace dynamiccl
