// A small world to explore the agreement in: the real clocks, members and leader, and a network
// that loses, doubles and reorders. What happens next is a choice; the explorer tries all of them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "adaptive/agreement/leader.h"
#include "adaptive/agreement/member.h"
#include "tests/flying.h"
#include "tests/inspect.h"
#include "tests/table_file.h"

namespace dynamiccl {

/// How large the world is, and what may go wrong in it.
struct Rules {
  int num_ranks = 2;
  int num_calls = 4;  // of each rank
  std::uint64_t span = 1;
  int simulates = 0;      // calls that one rank alone makes
  int sends = 0;          // groups of sends and receives, of one rank alone
  int group = 1;          // calls that are asked about together
  int num_proposals = 1;  // tables put one after the other
  int crashes = 0;
  int drops = 0;
  int repeats = 1;        // ticks at which what was not answered is said again
  int timeouts = 0;       // ticks at which every limit of leader and members has passed
  int lasting_waits = 0;  // calls that wait longer than they may
  bool reorders = true;
};

class World {
 public:
  explicit World(const Rules& rules) : rules_(rules), left_(rules) {
    timing_.repeat_ns = 1;
    timing_.retry_ns = 1;
    timing_.phase_ns = timing_.gather_ns = timing_.patience_ns = kLong;
    timing_.least_span = rules.span;
    timing_.span_ns = 0;
    for (int i = 0; i < rules.num_ranks; ++i) {
      auto rank = std::make_unique<Rank>();
      rank->world = this;
      rank->number = i;
      rank->clock = std::make_unique<Clock>(kLong);
      rank->marks.begin(true);
      rank->clock->heed(&rank->marks);
      rank->place = {7, i, rules.num_ranks, 1};
      const Outlet outlet = {send, rank.get()};
      rank->member = std::make_unique<Member>(rank->place, rank->clock.get(), outlet, timing_);
      rank->answers.assign(static_cast<std::size_t>(rules.num_calls) + 1, kNone);
      ranks_.push_back(std::move(rank));
    }
    Rank& first = *ranks_[0];
    first.leader =
        Leader::create(first.place, first.clock.get(), "", {send, &first}, timing_, now_);
    want_next();
    for (int i = 0; i < rules.num_ranks; ++i) {
      Message hello{};
      hello.kind = MessageKind::kHello;
      hello.rank = i;
      first.leader->receive(i, hello, now_);
    }
  }
  ~World() { Leader::destroy(ranks_[0]->leader); }

  /// What can happen now; the number of choices.
  int choices() {
    choices_.clear();
    const int deliverable = rules_.reorders ? static_cast<int>(flying_.size()) : 1;
    for (int i = 0; i < deliverable && i < static_cast<int>(flying_.size()); ++i) {
      choices_.push_back({kDeliver, i});
      if (left_.drops > 0) choices_.push_back({kDrop, i});
    }
    for (const auto& rank : ranks_) {
      if (!rank->alive) continue;
      const int i = rank->number;
      if (rank->can_call()) choices_.push_back({kCall, i});
      if (rank->is_to_wake) choices_.push_back({kWake, i});
      if (rank->waits && left_.lasting_waits > 0) choices_.push_back({kWaitTooLong, i});
      if (left_.repeats > 0) choices_.push_back({kRepeat, i});
      if (left_.timeouts > 0) choices_.push_back({kTimeout, i});
      const bool in_group = rank->done % rules_.group != 0;
      if (left_.simulates > 0 && !rank->waits && !rank->failed && !in_group) {
        choices_.push_back({kSimulate, i});
      }
      if (left_.sends > 0 && !rank->waits && !rank->failed && !in_group) {
        choices_.push_back({kSend, i});
      }
      if (left_.crashes > 0) choices_.push_back({kCrash, i});
    }
    return static_cast<int>(choices_.size());
  }

  void take(int choice) {
    const Choice chosen = choices_[static_cast<std::size_t>(choice)];
    if (trace) std::fprintf(stderr, "  %s %d\n", kNames[chosen.what], chosen.which);
    switch (chosen.what) {
      case kDeliver:
        deliver(chosen.which);
        break;
      case kDrop:
        --left_.drops;
        take_out(chosen.which);
        break;
      case kCall:
        begin_call(rank_at(chosen.which));
        break;
      case kWaitTooLong:
        --left_.lasting_waits;
        call(rank_at(chosen.which), now_ + 3 * kLong);
        break;
      case kRepeat:
        --left_.repeats;
        tick(chosen.which, now_ += 2);
        break;
      case kTimeout:
        --left_.timeouts;
        tick(chosen.which, now_ += 2 * kLong);
        break;
      case kWake: {
        Rank& rank = rank_at(chosen.which);
        rank.is_to_wake = false;
        tick(chosen.which, now_);
        break;
      }
      case kSimulate:
        --left_.simulates;
        simulate(rank_at(chosen.which));
        break;
      case kSend:
        --left_.sends;
        rank_at(chosen.which).marks.set_launched(new_group(&rank_at(chosen.which)));
        break;
      case kCrash:
        --left_.crashes;
        rank_at(chosen.which).alive = false;
        break;
    }
    want_next();
  }

  /// The first call at which two ranks answered from different tables; 0: none.
  int disagreement() const {
    for (std::size_t call = 1; call < ranks_[0]->answers.size(); ++call) {
      int seen = kNone;
      for (const auto& rank : ranks_) {
        const int answer = rank->answers[call];
        if (answer == kNone) continue;
        if (seen != kNone && seen != answer) return static_cast<int>(call);
        seen = answer;
      }
    }
    return 0;
  }

  std::uint64_t digest() const {
    std::uint64_t d = 1;
    for (const auto& rank : ranks_) {
      Inspect::add(&d, *rank->clock);
      Inspect::add(&d, *rank->member);
      Inspect::mix(&d, rank->alive | rank->waits << 1 | rank->failed << 2 | rank->simulates << 3 |
                           rank->is_to_wake << 4);
      for (const int answer : rank->answers)
        Inspect::mix(&d, static_cast<std::uint64_t>(answer + 2));
    }
    Inspect::add(&d, *ranks_[0]->leader);
    std::uint64_t all = 0;
    for (const Flying& each : flying_) all += each.digest();  // a set: in any order
    if (!rules_.reorders) {
      for (const Flying& each : flying_) Inspect::mix(&all, each.digest());
    }
    Inspect::mix(&d, all);
    Inspect::mix(&d, static_cast<std::uint64_t>(put_));
    for (const int left : {left_.crashes, left_.drops, left_.repeats, left_.timeouts,
                           left_.lasting_waits, left_.simulates, left_.sends}) {
      Inspect::mix(&d, static_cast<std::uint64_t>(left));
    }
    return d;
  }

  /// Runs on with nothing going wrong any more. Returns false when something never ends.
  bool run_out() {
    for (int round = 0; round < 400; ++round) {
      bool moved = false;
      while (!flying_.empty()) {
        deliver(0);
        moved = true;
      }
      for (const auto& rank : ranks_) {
        if (!rank->alive) continue;
        if (rank->can_call()) {
          begin_call(*rank);
          moved = true;
        }
        tick(rank->number, now_ += 2);
        if (rank->waits) call(*rank, now_ += round > 200 ? 3 * kLong : 1);
      }
      want_next();
      if (!moved && flying_.empty() && round > 250) break;
    }
    return std::all_of(ranks_.begin(), ranks_.end(), [](const auto& rank) {
      return !rank->alive || rank->failed || !rank->waits;
    });
  }

  bool any_failed() const {
    return std::any_of(ranks_.begin(), ranks_.end(), [](const auto& r) { return r->failed; });
  }
  bool any_crashed() const {
    return std::any_of(ranks_.begin(), ranks_.end(), [](const auto& r) { return !r->alive; });
  }
  std::uint32_t committed() const { return ranks_[0]->leader->committed(); }
  /// Calls answered from a table that was agreed on.
  int calls_with_table() const {
    int count = 0;
    for (const auto& rank : ranks_) {
      count += static_cast<int>(
          std::count_if(rank->answers.begin(), rank->answers.end(), [](int a) { return a > 0; }));
    }
    return count;
  }

  bool trace = false;

 private:
  static constexpr std::uint64_t kLong = 1'000'000'000'000;
  static constexpr int kNone = -1;
  // All are alike: what is simulated differs from what is called in nothing but the launch.
  static constexpr std::uint64_t kSizeBytes = 1024;
  enum What {
    kDeliver,
    kDrop,
    kCall,
    kWaitTooLong,
    kRepeat,
    kTimeout,
    kCrash,
    kSimulate,
    kSend,
    kWake
  };
  static constexpr const char* kNames[] = {"deliver", "drop",    "call",  "wait too long",
                                           "repeat",  "timeout", "crash", "simulate",
                                           "send",    "wake"};
  struct Choice {
    What what;
    int which;
  };
  struct Rank {
    World* world;
    int number;
    Member::Place place;
    CallMarks marks;
    std::unique_ptr<Clock> clock;
    std::unique_ptr<Member> member;
    Leader* leader = nullptr;
    bool alive = true, waits = false, failed = false, simulates = false, is_to_wake = false;
    std::vector<int> answers;  // [call] number of the table
    int done = 0;
    std::uintptr_t num_groups = 0;  // of calls and of sends
    bool can_call() const {
      return !failed && !waits && done + 1 < static_cast<int>(answers.size());
    }
  };

  Rank& rank_at(int number) { return *ranks_[static_cast<std::size_t>(number)]; }

  static void send(void* user, std::int32_t to, const Message& message) {
    auto* rank = static_cast<Rank*>(user);
    World& world = *rank->world;
    Flying flying = {rank->number, to, message, {}};
    if (message.body_bytes > 0) flying.body.assign(message.body, message.body + message.body_bytes);
    for (const Flying& other : world.flying_) {
      if (flying.same(other)) return;  // to hear the same twice changes nothing: see deliver()
    }
    world.flying_.push_back(std::move(flying));
    if (world.trace) {
      std::fprintf(stderr, "    %d -> %d kind %d proposal %u verdict %d index %lld\n", rank->number,
                   to, static_cast<int>(message.kind), message.proposal, message.verdict,
                   static_cast<long long>(message.index));
    }
  }

  Flying take_out(int which) {
    Flying flying = std::move(flying_[static_cast<std::size_t>(which)]);
    flying_.erase(flying_.begin() + which);
    return flying;
  }

  void deliver(int which) {
    Flying flying = take_out(which);
    flying.message.body = flying.body.data();
    Rank& to = rank_at(flying.to);
    if (!to.alive) return;
    for (int i = 0; i < 2; ++i) {  // and once more: every message may come twice
      to.member->receive(flying.from, flying.message, now_);
      if (to.leader != nullptr) to.leader->receive(flying.from, flying.message, now_);
    }
    go_on(to);
  }

  void tick(int number, std::uint64_t now) {
    Rank& rank = rank_at(number);
    rank.member->tick(now);
    if (rank.leader != nullptr) rank.leader->tick(now);
    go_on(rank);
  }

  /// NCCL tells of a group's calls before it asks about the first of them.
  void begin_call(Rank& rank) {
    if (rank.done % rules_.group == 0) rank.marks.group = new_group(&rank);
    call(rank, now_);
  }

  /// A call that waits looks again whenever something happened.
  void go_on(Rank& rank) {
    if (rank.waits) call(rank, now_);
  }

  /// ncclGroupSimulateEnd: the plugin is asked, and nothing runs. Should the question wait, so does
  /// the rank, but its answer does not count.
  void simulate(Rank& rank) {
    rank.simulates = true;
    rank.marks.group = new_group(&rank);
    call(rank, now_);
  }

  /// A handle as the profiler gives one to each group of the API.
  static const void* new_group(Rank* rank) {
    return reinterpret_cast<const void*>(++rank->num_groups);  // NOLINT
  }

  void call(Rank& rank, std::uint64_t now) {
    const bool was_waiting = rank.waits;
    const bool fast = !rank.waits && rank.clock->begin();
    rank.waits = false;
    const Clock::Turn turn = fast ? Clock::Turn::kGo : rank.clock->turn(now);
    if (turn == Clock::Turn::kWait) {
      rank.is_to_wake |= !was_waiting;  // it wakes the service, once
      rank.waits = true;
      return;
    }
    if (rank.simulates) {
      rank.simulates = false;
      rank.failed = turn == Clock::Turn::kFail;
      rank.clock->end(4, kSizeBytes);  // nothing is launched
      return;
    }
    const int number = rank.done + 1;
    if (turn == Clock::Turn::kGo) {
      rank.answers[static_cast<std::size_t>(number)] = static_cast<int>(rank.clock->table_number());
    }
    rank.failed = turn == Clock::Turn::kFail;
    rank.clock->end(4, kSizeBytes);
    if (number % rules_.group == 0) rank.marks.set_launched(rank.marks.group);
    rank.done = number;
  }

  void want_next() {
    Leader* leader = ranks_[0]->leader;
    if (put_ >= rules_.num_proposals || !ranks_[0]->alive) return;
    if (put_ > 0 && !leader->is_settled()) return;
    // The smallest there is: it is decoded at every vote.
    const Bytes bytes = table_of(1, rules_.num_ranks, {1, 2, 4, 1, 0}, kAllReduce, 0, 1);
    if (leader->propose(bytes.data(), bytes.size(), false)) ++put_;
  }

  const Rules rules_;
  Rules left_;
  Timing timing_;
  std::uint64_t now_ = 1;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::vector<Flying> flying_;
  std::vector<Choice> choices_;
  int put_ = 0;
};

}  // namespace dynamiccl
