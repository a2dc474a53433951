// The coordinator of the agreement, in what the explorer's small worlds do not show: many ranks,
// long times, and what is kept meanwhile.
#include <cstdio>
#include <memory>
#include <vector>

#include "tests/check.h"
#include "tests/tuner_world.h"

namespace {

std::uint64_t draw(void* user) { return ++*static_cast<std::uint64_t*>(user); }

/// A coordinator and one communicator of `num_ranks` ranks.
struct Ranks {
  explicit Ranks(std::uint32_t num_ranks, int objects = -1) {
    for (std::uint32_t rank = 0; rank < num_ranks; ++rank) add(num_ranks, rank, objects);
  }

  void add(std::uint32_t num_ranks, std::uint32_t rank, int objects) {
    Request vote;
    vote.num_ranks = num_ranks;
    vote.attempt = 1;
    vote.comm_id = comm_id;
    vote.nonce = ++nonces;
    const bool is_sound = static_cast<int>(rank) != objects;
    std::snprintf(vote.identity, sizeof vote.identity, "problem=%s\n", is_sound ? "none" : "some");
    voters.emplace_back(vote, !is_sound, limit_ms(num_ranks) / 2, now_ms);
  }

  /// One request of a rank and its answer.
  void ask(std::size_t rank) {
    Answer answer;
    const Request request = voters[rank].request();
    coordinator.answer(request, now_ms, &answer);
    coordinator.note_sent(request);
    voters[rank].hear(answer, now_ms);
  }

  /// Each rank asks when it is due, and each question takes `cost_us`, until all have ended.
  void play(std::uint64_t cost_us) {
    std::uint64_t now_us = 1'000 * now_ms;
    for (bool any = true; any;) {
      any = false;
      for (std::size_t rank = 0; rank < voters.size(); ++rank) {
        if (voters[rank].outcome() != Outcome::kOpen) continue;
        any = true;
        if (voters[rank].send_at_ms() > now_ms) continue;
        now_us += cost_us;
        now_ms = now_us / 1'000;
        ask(rank);
      }
      now_us += 1'000;
      now_ms = now_us / 1'000;
      coordinator.look_at_clock(now_ms);
    }
  }

  int count(Outcome outcome) const {
    int count = 0;
    for (const Voter& voter : voters) count += voter.outcome() == outcome ? 1 : 0;
    return count;
  }

  std::uint64_t drawn = 0, nonces = 0, now_ms = 1'000, comm_id = 7;
  Coordinator coordinator{1, draw, nullptr, &drawn};
  std::vector<Voter> voters;
};

/// After one time-out the limit is short; so many ranks must still come to an end within it.
void ten_thousand_ranks_agree_after_a_time_out() {
  for (const std::uint32_t num_ranks : {2U, 100U, 2'000U, 10'000U}) {
    Ranks ranks(num_ranks);
    Request lonely = Ranks(2).voters[0].request();
    lonely.kind = RequestKind::kVote;
    lonely.incarnation = ranks.coordinator.incarnation();
    lonely.comm_id = 99;
    Answer answer;
    ranks.coordinator.answer(lonely, ranks.now_ms, &answer);
    for (int second = 0; second < 11; ++second) {
      ranks.now_ms += 1'000;
      ranks.coordinator.look_at_clock(ranks.now_ms);
    }
    ranks.voters.clear();
    for (std::uint32_t rank = 0; rank < num_ranks; ++rank) ranks.add(num_ranks, rank, -1);
    ranks.play(50);  // a request over loopback
    CHECK(ranks.count(Outcome::kTable) == static_cast<int>(num_ranks));
  }
}

/// A rank that was stopped after its confirm, for an hour, while others had the table.
void a_table_stays_the_answer() {
  Ranks ranks(3);
  for (std::size_t rank = 0; rank < 3; ++rank) {
    for (int i = 0; i < 2; ++i) ranks.ask(rank);  // hello, vote; the last is asked at once
  }
  for (std::size_t rank = 0; rank < 2; ++rank) {
    for (int i = 0; i < 2; ++i) ranks.ask(rank);  // still here?, confirm
  }
  CHECK(ranks.voters[2].has_confirmed());
  Answer lost;
  ranks.coordinator.answer(ranks.voters[2].request(), ranks.now_ms, &lost);
  CHECK(lost.kind == AnswerKind::kTable);
  ranks.coordinator.note_sent(ranks.voters[2].request());
  for (std::size_t rank = 0; rank < 2; ++rank) ranks.ask(rank);
  CHECK(ranks.count(Outcome::kTable) == 2);
  CHECK(!ranks.coordinator.is_awaited() && Explored::num_with_votes(ranks.coordinator) == 0);
  for (int second = 0; second < 3'600; ++second) {
    ranks.now_ms += 1'000;
    ranks.coordinator.look_at_clock(ranks.now_ms);
  }
  ranks.ask(2);
  CHECK(ranks.count(Outcome::kTable) == 3);
  // Whoever was never asked has no part in it.
  ranks.add(3, 3, -1);
  for (int i = 0; i < 2; ++i) ranks.ask(3);
  CHECK(ranks.voters[3].outcome() == Outcome::kAbstain);
}

/// A rank with a problem is one that waits for its answer, as all are.
void ranks_are_awaited_until_all_have_their_answer() {
  Ranks ranks(3, 2);
  for (int i = 0; i < 2; ++i) ranks.ask(0);
  CHECK(ranks.coordinator.is_awaited());
  for (int i = 0; i < 2; ++i) ranks.ask(2);
  CHECK(ranks.voters[2].outcome() == Outcome::kAbstain);
  CHECK(ranks.coordinator.is_awaited());
  Answer unsent;
  ranks.coordinator.answer(ranks.voters[0].request(), ranks.now_ms, &unsent);
  CHECK(unsent.kind == AnswerKind::kAbstain && ranks.coordinator.is_awaited());
  ranks.ask(0);
  CHECK(ranks.voters[0].outcome() == Outcome::kAbstain);
  CHECK(!ranks.coordinator.is_awaited());
}

/// Of a communicator without a rank in the coordinator's process, which ends: one has confirmed.
void a_coordinator_that_ends_leaves_nobody_without_an_answer() {
  Ranks ranks(2);
  for (std::size_t rank = 0; rank < 2; ++rank) {
    for (int i = 0; i < 2; ++i) ranks.ask(rank);
  }
  ranks.ask(1);
  CHECK(ranks.voters[1].has_confirmed() && ranks.voters[1].outcome() == Outcome::kOpen);
  ranks.coordinator.retire(ranks.now_ms);
  for (std::size_t rank = 0; rank < 2; ++rank) ranks.ask(rank);
  CHECK(ranks.count(Outcome::kAbstain) == 2 && !ranks.coordinator.is_awaited());
}

void what_was_answered_is_not_kept() {
  Ranks ranks(8);
  for (int round = 0; round < 1'000; ++round) {
    ranks.comm_id = 1'000 + static_cast<std::uint64_t>(round);
    ranks.voters.clear();
    for (std::uint32_t rank = 0; rank < 8; ++rank) ranks.add(8, rank, round % 2 == 0 ? -1 : 3);
    ranks.play(0);
  }
  CHECK(ranks.coordinator.num_rounds() == 1'000);
  CHECK(Explored::num_with_votes(ranks.coordinator) <= 1'000 / 2);
  ranks.now_ms += 50'000;
  ranks.coordinator.look_at_clock(ranks.now_ms);
  CHECK(Explored::num_with_votes(ranks.coordinator) == 0);
}

}  // namespace

int main() {
  ten_thousand_ranks_agree_after_a_time_out();
  a_table_stays_the_answer();
  ranks_are_awaited_until_all_have_their_answer();
  a_coordinator_that_ends_leaves_nobody_without_an_answer();
  what_was_answered_is_not_kept();
  return g_failures;
}
