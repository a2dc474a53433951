// One schedule of a small world (tuner_world.h): what may happen next, and what it came to.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "tests/tuner_world.h"

namespace {

class Play {
 public:
  explicit Play(const World& world) : world_(world), left_(world.budget) {
    replace_coordinator();
    if (world.second == Second::kGrown) tell_of_shrink();
    for (int rank = 0; rank < world.num_ranks; ++rank) {
      if (rank != world.never_comes && !is_late(rank)) begin(rank, 0, 0);
    }
    if (world.second == Second::kNone) return;
    for (int rank = 0; rank < world.num_ranks; ++rank) begin(rank, 0, 1);
  }

  std::vector<Action> choices() const {
    std::vector<Action> found;
    for (int i = 0; i < size(inits_); ++i) {
      const Init& init = inits_[static_cast<std::size_t>(i)];
      if (!is_open(init)) continue;
      if (init.exchange == 0 && init.voter.send_at_ms() <= now_of(init)) {
        found.push_back({world_.whole ? Kind::kAsk : Kind::kSend, i});
        if (world_.whole && left_.lost > 0) found.push_back({Kind::kAskInVain, i});
      }
      if (init.exchange != 0 && left_.given_up > 0) found.push_back({Kind::kGiveUp, i});
      if (left_.aborted > 0) found.push_back({Kind::kAbort, i});
      if (left_.stopped > 0) found.push_back({Kind::kStop, i});
      if (left_.stopped > 0) found.push_back({Kind::kSuspend, i});
    }
    if (world_.late && !has_arrived_) found.push_back({Kind::kArrive, 0});
    for (int i = 0; i < size(flights_); ++i) {
      const bool to_rank = flights_[static_cast<std::size_t>(i)].is_answer;
      found.push_back({to_rank ? Kind::kToRank : Kind::kToCoordinator, i});
      if (left_.lost > 0) found.push_back({Kind::kLose, i});
      if (left_.doubled > 0 && !to_rank) found.push_back({Kind::kDouble, i});
    }
    if (left_.crashed > 0) found.push_back({Kind::kCrash, 0});
    if (left_.stalls > 0) found.push_back({Kind::kStall, 0});
    return found;
  }

  void act(const Action& action) {
    const auto at = static_cast<std::size_t>(action.index);
    switch (action.kind) {
      case Kind::kSend: {
        Init& init = *std::next(inits_.begin(), action.index);
        init.exchange = ++exchanges_;
        flights_.push_back({false, action.index, init.exchange, init.voter.request(), {}});
        break;
      }
      case Kind::kToCoordinator: {
        Flight flight = flights_[at];
        flights_.erase(flights_.begin() + action.index);
        Answer answer;
        coordinator_->answer(flight.request, now_ms_, &answer);
        flights_.push_back({true, flight.init, flight.exchange, {}, answer});
        break;
      }
      case Kind::kToRank: {
        const Flight flight = flights_[at];
        flights_.erase(flights_.begin() + action.index);
        Init& init = inits_[static_cast<std::size_t>(flight.init)];
        if (is_open(init) && init.exchange == flight.exchange) {
          init.exchange = 0;
          init.voter.hear(flight.answer, now_of(init));
        }
        break;
      }
      case Kind::kAsk:
      case Kind::kAskInVain: {
        Init& init = inits_[at];
        Answer answer;
        coordinator_->answer(init.voter.request(), now_ms_, &answer);
        if (action.kind == Kind::kAsk) {
          init.voter.hear(answer, now_of(init));
        } else {
          --left_.lost;
          init.voter.hear_nothing(now_of(init));
        }
        break;
      }
      case Kind::kLose:
        --left_.lost;
        flights_.erase(flights_.begin() + action.index);
        break;
      case Kind::kDouble:
        --left_.doubled;
        flights_.push_back(flights_[at]);
        break;
      case Kind::kGiveUp:
        --left_.given_up;
        give_up(&inits_[at]);
        break;
      case Kind::kAbort: {
        --left_.aborted;
        inits_[at].aborted = true;
        break;
      }
      case Kind::kCrash:
        --left_.crashed;
        was_lost_ = true;
        replace_coordinator();
        break;
      case Kind::kStall:
        --left_.stalls;
        now_ms_ += 11'000;
        look_at_clocks();
        break;
      case Kind::kStop:
      case Kind::kSuspend:
        --left_.stopped;
        stop(at, action.kind == Kind::kStop);
        break;
      case Kind::kArrive:
        has_arrived_ = true;
        begin(world_.num_ranks - 1, 0, 0);
        break;
    }
    settle();
  }

  /// Delivers what is on its way, and lets every rank that wants to ask now have its answer.
  void exchange_all() {
    while (!flights_.empty()) {
      act({flights_[0].is_answer ? Kind::kToRank : Kind::kToCoordinator, 0});
    }
    for (int i = 0; i < size(inits_); ++i) {
      while (is_open(inits_[static_cast<std::size_t>(i)]) &&
             inits_[static_cast<std::size_t>(i)].exchange == 0 &&
             inits_[static_cast<std::size_t>(i)].voter.send_at_ms() <=
                 now_of(inits_[static_cast<std::size_t>(i)])) {
        act({Kind::kSend, i});
        while (!flights_.empty()) {
          act({flights_[0].is_answer ? Kind::kToRank : Kind::kToCoordinator, 0});
        }
      }
    }
  }

  /// When nothing is left to be done now, time passes. False when all inits have ended.
  bool let_time_pass() {
    for (Init& init : inits_) {
      if (is_open(init) && init.exchange != 0) give_up(&init);  // its message was lost
    }
    std::uint64_t next = UINT64_MAX;
    for (const Init& init : inits_) {
      if (is_open(init)) next = std::min(next, init.voter.send_at_ms() + init.behind_ms);
    }
    if (world_.late && !has_arrived_ && next == UINT64_MAX) {
      act({Kind::kArrive, 0});
      return true;
    }
    if (next == UINT64_MAX) return false;
    now_ms_ = std::max(now_ms_ + 1, next);
    coordinator_->look_at_clock(now_ms_);
    look_at_clocks();
    settle();
    return true;
  }

  bool is_quiet() const {
    for (const Init& init : inits_) {
      if (is_open(init) && (init.exchange != 0 || init.voter.send_at_ms() <= now_of(init))) {
        return false;
      }
    }
    return flights_.empty();
  }

  std::uint64_t now_ms() const { return now_ms_; }

  /// What is wrong with how it ended, or null.
  const char* verdict() {
    const int last = inits_.empty() ? 0 : last_instance();
    for (int of = 0; of < 2 * (last + 1); ++of) {
      int tables = 0, abstained = 0, failed = 0, present = 0;
      for (const Init& init : inits_) {
        if (2 * init.instance + init.comm != of || init.aborted) continue;
        ++present;
        tables += init.outcome() == Outcome::kTable;
        abstained += init.outcome() == Outcome::kAbstain;
        failed += init.outcome() == Outcome::kFailed;
        if (init.outcome() == Outcome::kOpen) return "an init never ends";
        if (init.outcome() == Outcome::kFailed && !init.voter.has_confirmed()) {
          return "an init failed that could have abstained";
        }
      }
      if (failed > 0 && !was_lost_) return "an init failed though no coordinator was lost";
      if (present == world_.num_ranks && tables > 0 && abstained > 0) return "ranks differ";
      const bool is_first = of % 2 == 0;
      if (tables > 0 && is_first && (world_.differs >= 0 || world_.objects >= 0)) {
        return "unlike, and a table";
      }
      if (tables > 0 && ids_repeat()) return "ids repeat, and a table";
    }
    const Budget& budget = world_.budget;
    const bool calm = budget.lost + budget.doubled + budget.given_up + budget.aborted +
                          budget.crashed + budget.stalls + budget.stopped ==
                      0;
    if (calm && !ids_repeat() && !world_.late && world_.differs < 0 && world_.objects < 0 &&
        world_.never_comes < 0) {
      for (const Init& init : inits_) {
        if (init.outcome() != Outcome::kTable) return "nothing failed, and no table";
      }
    }
    return nullptr;
  }

  std::string state() const {
    std::string text;
    const auto put = [&text](std::uint64_t number) { text += std::to_string(number) + ","; };
    Explored::describe(*coordinator_, now_ms_, &text);
    for (const Init& init : inits_) {
      put(static_cast<std::uint64_t>(init.outcome()));
      put(static_cast<std::uint64_t>(init.aborted));
      put(static_cast<std::uint64_t>(init.rank));
      put(static_cast<std::uint64_t>(init.comm));
      if (!is_open(init)) continue;
      put(init.voter.request().incarnation);
      put(init.voter.request().question);
      put(static_cast<std::uint64_t>(init.voter.request().kind));
      put(init.voter.send_at_ms() - now_of(init));
      Explored::describe(init.voter, now_of(init), &text);
      put(init.exchange != 0 ? 1U : 0U);
    }
    for (const Flight& flight : flights_) {
      put(flight.is_answer ? 7U : 8U);
      put(static_cast<std::uint64_t>(flight.init));
      put(inits_[static_cast<std::size_t>(flight.init)].exchange == flight.exchange ? 1U : 0U);
      put(static_cast<std::uint64_t>(flight.is_answer ? int(flight.answer.kind)
                                                      : int(flight.request.kind)));
      put(flight.is_answer ? flight.answer.question : flight.request.question);
      put(flight.is_answer ? flight.answer.incarnation : flight.request.incarnation);
    }
    for (const int left : {left_.lost, left_.doubled, left_.given_up, left_.aborted, left_.crashed,
                           left_.stalls, left_.stopped, has_arrived_ ? 1 : 0}) {
      put(static_cast<std::uint64_t>(left));
    }
    return text;
  }

 private:
  template <typename T>
  static int size(const T& list) {
    return static_cast<int>(list.size());
  }
  static bool is_open(const Init& init) {
    return !init.aborted && init.outcome() == Outcome::kOpen;
  }

  int last_instance() const {
    int last = 0;
    for (const Init& init : inits_) last = std::max(last, init.instance);
    return last;
  }

  std::uint64_t now_of(const Init& init) const { return now_ms_ - init.behind_ms; }
  bool is_late(int rank) const { return world_.late && rank == world_.num_ranks - 1; }
  bool ids_repeat() const {
    return world_.second == Second::kSplit || world_.second == Second::kGrown;
  }

  void look_at_clocks() {
    for (Init& init : inits_) init.voter.look_at_clock(now_of(init));
  }

  /// The others go on meanwhile, and their messages arrive.
  void stop(std::size_t stopped, bool clock_too) {
    for (int second = 0; second < 45; ++second) {
      now_ms_ += 1'000;
      if (clock_too) inits_[stopped].behind_ms += 1'000;
      coordinator_->look_at_clock(now_ms_);
      for (std::size_t i = 0; i < inits_.size(); ++i) {
        Init& init = inits_[i];
        if (i == stopped || !is_open(init)) continue;
        init.voter.look_at_clock(now_of(init));
        if (init.exchange != 0) give_up(&init);
        while (is_open(init) && init.voter.send_at_ms() <= now_of(init)) {
          Answer answer;
          coordinator_->answer(init.voter.request(), now_ms_, &answer);
          init.voter.hear(answer, now_of(init));
        }
      }
    }
    if (!clock_too && inits_[stopped].exchange != 0) give_up(&inits_[stopped]);
    if (!clock_too) inits_[stopped].voter.look_at_clock(now_of(inits_[stopped]));
  }

  /// The shrink before this world: its ranks told the coordinator.
  void tell_of_shrink() {
    Request told;
    told.kind = RequestKind::kVote;
    told.attempt = 1;
    told.incarnation = coordinator_->incarnation();
    told.num_ranks = 2;
    told.comm_id = 6;
    told.nonce = 1 + ++nonces_;
    told.ids_repeat = 1;
    std::snprintf(told.identity, sizeof told.identity, "problem=shrunk\n");
    Answer answer;
    coordinator_->answer(told, now_ms_, &answer);
  }

  void begin(int rank, int instance, int comm) {
    Request vote;
    vote.num_ranks = static_cast<std::uint32_t>(world_.num_ranks);
    vote.attempt = 1;
    vote.comm_id = world_.second == Second::kOther && comm == 1 ? 8 : 7;
    vote.nonce = 1 + ++nonces_;
    const bool knows =
        world_.second == Second::kSplit || (world_.second == Second::kGrown && rank == 0);
    const bool objects = (rank == world_.objects && comm == 0) || knows;
    vote.ids_repeat = knows ? 1 : 0;
    const char* problem = objects ? "no artifact" : "none";
    std::snprintf(vote.identity, sizeof vote.identity, "problem=%s\ntable=%s\n", problem,
                  rank == world_.differs && comm == 0 ? "b" : "a");
    std::snprintf(vote.who, sizeof vote.who, "rank %d", rank);
    inits_.push_back(
        {rank, instance, comm, Voter(vote, objects, limit_ms(vote.num_ranks) / 2, now_ms_)});
  }

  void replace_coordinator() {
    coordinator_ = std::make_unique<Coordinator>(
        1, [](void* user) { return ++*static_cast<std::uint64_t*>(user); }, nullptr, &drawn_);
  }

  void give_up(Init* init) {
    init->exchange = 0;
    init->voter.hear_nothing(now_of(*init));
  }

  /// An aborted creation is tried again under the same id, once it has ended on all ranks: what
  /// NCCL exchanges before a tuner's `init` needs them all (bootstrap, 2.30.7 `init.cc:1037,1283`).
  void settle() {
    const int last = last_instance();
    bool aborted = false;
    for (const Init& init : inits_) {
      if (init.instance != last) continue;
      if (is_open(init)) return;
      aborted |= init.aborted;
    }
    if (!aborted || (world_.late && !has_arrived_)) return;
    for (int rank = 0; rank < world_.num_ranks; ++rank) {
      if (rank != world_.never_comes) begin(rank, last + 1, 0);
    }
  }

  World world_;
  Budget left_;
  std::uint64_t now_ms_ = 1'000;
  std::uint64_t drawn_ = 100;
  std::uint64_t nonces_ = 0;
  int exchanges_ = 0;
  bool was_lost_ = false;
  bool has_arrived_ = false;
  std::unique_ptr<Coordinator> coordinator_;
  std::vector<Init> inits_;
  std::vector<Flight> flights_;
};

}  // namespace
