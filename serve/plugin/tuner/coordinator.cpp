// Implementation of coordinator.h.
#include "tuner/coordinator.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "identity/difference.h"
#include "tuner/voter.h"

namespace dynamiccl {
namespace {

/// After one time-out in a job its other rounds get a short limit, and after three none: a rank
/// without the plugin costs a job seconds in all, and not seconds for each communicator.
constexpr int kMostTimeouts = 3;
constexpr int kMostRounds = 1 << 16;
constexpr std::uint32_t kMostRanks = 1 << 20;
/// Pause before the next request: a request takes some 50 us here and each rank sends a few; a rank
/// that has waited long may wait a little longer.
constexpr std::uint32_t kLeastWaitMs = 2;
constexpr std::uint32_t kRanksPerMs = 10;
constexpr std::uint64_t kShareOfAge = 16;
constexpr char kRetired[] = "the coordinator's process ends";

}  // namespace

struct Coordinator::Round {
  Round* earlier;
  std::uint64_t comm_id;
  std::uint64_t first_vote_ms;
  std::uint64_t decided_ms;
  std::uint64_t question;
  Vote* votes;  // hashed by nonce; null once all of them have their answer, or had time to
  char* identity;
  char* who;
  char* reason;  // null while open
  std::uint32_t num_slots;
  std::uint32_t num_ranks;
  std::uint32_t num_votes;
  std::uint32_t num_confirmed;
  std::uint32_t num_told;
  State state;

  bool is_decided() const noexcept { return state == State::kTable || state == State::kAbstain; }
  void forget_first_vote() noexcept {
    std::free(identity);
    std::free(who);
    identity = who = nullptr;
  }
};

Coordinator::Coordinator(std::uint64_t attempt, Draw draw, Log log, void* user) noexcept
    : attempt_(attempt), incarnation_(draw(user)), draw_(draw), log_(log), user_(user) {}

Coordinator::~Coordinator() {
  for (Round* round = latest_; round != nullptr;) {
    std::free(round->votes);
    round->forget_first_vote();
    std::free(round->reason);
    std::free(std::exchange(round, round->earlier));
  }
}

void Coordinator::answer(const Request& request, std::uint64_t now_ms, Answer* answer) noexcept {
  look_at_clock(now_ms);
  *answer = Answer{};
  answer->incarnation = incarnation_;
  if (request.attempt != attempt_) return;  // retry
  if (request.kind == RequestKind::kHello) {
    answer->kind = AnswerKind::kWelcome;
    return;
  }
  if (request.incarnation != incarnation_) return;  // retry
  Round* round = find(request);
  if (round == nullptr && request.kind == RequestKind::kConfirm) return;  // retry
  if (round == nullptr) round = begin(request, now_ms);
  if (round == nullptr) {
    answer->kind = AnswerKind::kAbstain;
    std::snprintf(answer->reason, sizeof answer->reason, "the coordinator has no memory left");
    return;
  }
  if (request.kind == RequestKind::kVote) {
    take_vote(round, request, now_ms);
    ids_repeat_ |= request.ids_repeat != 0;
  }
  if (request.kind == RequestKind::kConfirm) take_confirm(round, request, now_ms);
  tell(round, request, now_ms, answer);
}

void Coordinator::note_sent(const Request& request) noexcept {
  Round* round = find(request);
  if (round == nullptr || !round->is_decided() || round->votes == nullptr) return;
  Vote* vote = slot(*round, request.nonce);
  if (vote->nonce == 0 || vote->told) return;
  vote->told = true;  // and told again where that was lost
  if (++round->num_told == round->num_votes) forget_votes(round);
}

Coordinator::Round* Coordinator::find(const Request& request) noexcept {
  Round* round = latest_;
  while (round != nullptr && round->comm_id != request.comm_id) round = round->earlier;
  return round;
}

Coordinator::Round* Coordinator::begin(const Request& request, std::uint64_t now_ms) noexcept {
  if (num_rounds_ == kMostRounds || request.num_ranks > kMostRanks) return nullptr;
  auto* round = static_cast<Round*>(std::calloc(1, sizeof(Round)));
  if (round == nullptr) return nullptr;
  round->earlier = std::exchange(latest_, round);
  round->comm_id = request.comm_id;
  round->first_vote_ms = now_ms;
  round->num_ranks = request.num_ranks;
  round->num_slots = 4;
  while (round->num_slots < 2 * request.num_ranks) round->num_slots *= 2;
  round->votes = static_cast<Vote*>(std::calloc(round->num_slots, sizeof(Vote)));
  round->identity = strdup(request.identity);
  round->who = strdup(request.who);
  ++num_rounds_;
  ++num_open_;
  ++num_with_votes_;
  if (round->votes == nullptr || round->identity == nullptr || round->who == nullptr) {
    decide(round, State::kAbstain, "the coordinator has no memory left", now_ms);
  } else if (num_timeouts_ >= kMostTimeouts) {
    decide(round, State::kAbstain, "ranks of three communicators of this job never came", now_ms);
  } else if (is_retired_) {
    decide(round, State::kAbstain, kRetired, now_ms);
  } else if (ids_repeat_) {
    decide(round, State::kAbstain, "this job has shrunk a communicator: ids may repeat", now_ms);
  }
  return round;
}

/// The slot of a nonce, or the free one that it would take. There is always a free one.
Coordinator::Vote* Coordinator::slot(const Round& round, std::uint64_t nonce) noexcept {
  std::uint32_t at = static_cast<std::uint32_t>(nonce) & (round.num_slots - 1);
  while (round.votes[at].nonce != nonce && round.votes[at].nonce != 0) {
    at = (at + 1) & (round.num_slots - 1);
  }
  return &round.votes[at];
}

void Coordinator::take_vote(Round* round, const Request& request, std::uint64_t now_ms) noexcept {
  if (round->is_decided()) return;
  Vote* vote = slot(*round, request.nonce);
  if (vote->nonce != 0) return;  // asked again
  char reason[kMaxReasonBytes], difference[200];
  if (request.num_ranks != round->num_ranks) {
    std::snprintf(reason, sizeof reason, "%s says %u ranks, %s says %u", round->who,
                  round->num_ranks, request.who, request.num_ranks);
    return decide(round, State::kAbstain, reason, now_ms);
  }
  if (find_difference(round->identity, request.identity, std::strlen(request.identity),
                      difference)) {
    std::snprintf(reason, sizeof reason, "%s differs from %s: %s", request.who, round->who,
                  difference);
    return decide(round, State::kAbstain, reason, now_ms);
  }
  if (round->state == State::kAsking) {
    std::snprintf(reason, sizeof reason,
                  "%s is one more than its %u ranks: an init was tried again, or two communicators "
                  "have one id",
                  request.who, round->num_ranks);
    return decide(round, State::kAbstain, reason, now_ms);
  }
  vote->nonce = request.nonce;
  ++round->num_votes;
  // All votes are equal, but none of the ranks can use the table.
  if (std::strncmp(request.identity, "problem=none\n", 13) != 0) {
    const char* problem = request.identity + std::strcspn(request.identity, "=");
    std::snprintf(reason, sizeof reason, "%s: %.*s", request.who,
                  static_cast<int>(std::strcspn(problem, "\n")), problem + (*problem == '='));
    return decide(round, State::kAbstain, reason, now_ms);
  }
  if (round->num_votes == round->num_ranks) {
    round->state = State::kAsking;
    round->question = draw_(user_);
  }
}

void Coordinator::take_confirm(Round* round, const Request& request,
                               std::uint64_t now_ms) noexcept {
  if (round->state != State::kAsking || request.question != round->question) return;
  Vote* vote = slot(*round, request.nonce);
  if (vote->nonce == 0 || vote->confirmed) return;
  vote->confirmed = true;
  if (++round->num_confirmed == round->num_ranks) decide(round, State::kTable, "", now_ms);
}

void Coordinator::tell(Round* round, const Request& request, std::uint64_t now_ms,
                       Answer* answer) noexcept {
  Vote* vote = round->votes != nullptr ? slot(*round, request.nonce) : nullptr;
  const bool counts = vote != nullptr && vote->nonce != 0;
  switch (round->state) {
    case State::kOpen:
    case State::kAsking:
      if (round->state == State::kAsking && counts && !vote->confirmed) {
        answer->kind = AnswerKind::kStillHere;
        answer->question = round->question;
        return;
      }
      answer->kind = AnswerKind::kWait;
      answer->wait_ms = kLeastWaitMs + round->num_ranks / kRanksPerMs +
                        static_cast<std::uint32_t>((now_ms - round->first_vote_ms) / kShareOfAge);
      return;
    case State::kTable:
      // A late rank gets the answer too, whether its vote is still stored or not.
      if (request.kind == RequestKind::kConfirm && request.question == round->question) {
        answer->kind = AnswerKind::kTable;
        return;
      }
      answer->kind = AnswerKind::kAbstain;
      std::snprintf(answer->reason, sizeof answer->reason,
                    "a communicator of this id has its ranks already");
      return;
    case State::kAbstain:
      answer->kind = AnswerKind::kAbstain;
      std::snprintf(answer->reason, sizeof answer->reason, "%s",
                    round->reason != nullptr ? round->reason : "memory is short");
      return;
  }
}

void Coordinator::forget_votes(Round* round) noexcept {
  std::free(round->votes);
  round->votes = nullptr;
  --num_with_votes_;
}

void Coordinator::decide(Round* round, State state, const char* reason,
                         std::uint64_t now_ms) noexcept {
  round->state = state;
  round->decided_ms = now_ms;
  round->reason = strdup(reason);
  --num_open_;
  // All ranks that voted must get the answer.
  if (round->num_votes == 0) forget_votes(round);
  if (log_ != nullptr) {
    log_(user_, {round->comm_id, round->num_ranks, round->num_votes, state == State::kTable,
                 now_ms - round->first_vote_ms, round->identity != nullptr ? round->identity : "",
                 reason});
  }
  round->forget_first_vote();
}

std::uint64_t Coordinator::limit_of(const Round& round) const noexcept {
  return num_timeouts_ == 0 ? limit_ms(round.num_ranks) : short_limit_ms(round.num_ranks);
}

void Coordinator::look_at_clock(std::uint64_t now_ms) noexcept {
  const std::uint64_t slept_ms = looked_at_ms_ == 0 ? 0 : now_ms - looked_at_ms_;
  looked_at_ms_ = now_ms;
  Round* round = latest_;
  for (int left = num_with_votes_; left > 0; round = round->earlier) {
    if (round->votes == nullptr) continue;
    --left;
    if (round->is_decided()) {
      // By then every rank that waits for its answer has ended, or was stopped.
      if (now_ms - round->decided_ms > 4 * limit_ms(round->num_ranks)) forget_votes(round);
      continue;
    }
    char reason[kMaxReasonBytes];
    if (slept_ms > limit_of(*round)) {
      decide(round, State::kAbstain, "the coordinator was stopped for longer than the limit",
             now_ms);
    } else if (now_ms - round->first_vote_ms > limit_of(*round)) {
      const std::uint32_t came =
          round->state == State::kOpen ? round->num_votes : round->num_confirmed;
      std::snprintf(reason, sizeof reason, "%u of %u ranks %s within %llu s", came,
                    round->num_ranks, round->state == State::kOpen ? "came" : "were still there",
                    static_cast<unsigned long long>(limit_of(*round) / 1'000));
      ++num_timeouts_;
      decide(round, State::kAbstain, reason, now_ms);
    }
  }
}

void Coordinator::retire(std::uint64_t now_ms) noexcept {
  is_retired_ = true;
  for (Round* round = latest_; num_open_ > 0; round = round->earlier) {
    if (!round->is_decided()) decide(round, State::kAbstain, kRetired, now_ms);
  }
}

bool Coordinator::is_awaited() const noexcept {
  for (const Round* round = latest_; round != nullptr; round = round->earlier) {
    if (!round->is_decided()) return true;
    if (round->votes != nullptr && round->num_told < round->num_votes) return true;
  }
  return false;
}

}  // namespace dynamiccl
