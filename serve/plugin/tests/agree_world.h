// A small world for the vote of `agree/`: ranks on hosts, the arbiter's keeper and worker, and what
// a cluster does to them. Its machines are the shipped ones; what happens next is a choice.
//
// Each process has one thread that makes calls, one after the other, of one or two communicators;
// at a stop it waits inside its call. A call's kernel waits for nobody: a rank may be any number of
// calls ahead, as NCCL's are. What a rank used for each of its calls is kept.
//
// Processes are killed, and stand still (SIGSTOP, a frozen VM) while their clock goes on.
// Connections hold what was sent and not yet read; a cut loses any end of it, and either side
// learns of it or does not. The kernel accepts connections while keeper or worker live; a new
// worker finds those that the killed one had not accepted. A worker may be killed between two of
// its effects: after it has logged and before it has told anybody. Time passes when nothing else
// can happen, or before a message that is late.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "agree/ballot.h"
#include "agree/marks.h"
#include "agree/rounds.h"
#include "agree/stops.h"
#include "identity/ids.h"

namespace dynamiccl {

inline constexpr std::uint64_t kJob = 1, kOtherJob = 2, kComm = 77, kOtherComm = 78;

struct Budget {
  int rank_kills = 0;
  int worker_kills = 0;
  int keeper_kills = 0;
  int stops = 0;  // of a rank or the worker; the first may last almost the answer limit
  int cuts = 0;
  int late = 0;       // times that the clock goes on although something could happen
  int strangers = 0;  // another job's arbiter at the address of ours, once both processes are dead
  int aborts = 0;     // of a communicator, inside a stop
  int skips = 0;      // stops that a rank leaves out: it has waited enough, or has no descriptor
};

enum class Second : std::uint8_t {
  kNone,
  kSameProcesses,   // which make another communicator at the same time
  kOtherProcesses,  // have another communicator
  kShrinks,         // two disjoint shrinks of one parent, which have one id
};

struct Setup {
  const char* name;
  int num_ranks = 2;
  Budget budget = {};
  int differs = -1;
  int never_comes = -1;
  Second second = Second::kNone;
  bool log_is_full = false;
  /// The arbiter is not outside the job but lives in this process, and dies with it: what must be
  /// wrong.
  int arbiter_in_process = -1;
  /// After `init`, what each process calls: `a` a call of the first communicator, `b` of the
  /// second, `s` one that is only simulated and `c` one that is captured, of the first; `-`: it
  /// sees a shrink. All calls are equal, since others are told apart.
  std::string calls = "";
  std::string calls_of_last = "=";  // of the last process; `=`: the same
  std::uint64_t first_stop = 1;
  std::uint64_t span_calls = 1;
  std::uint64_t gap_calls = 1;  // from a stop that succeeds to the next
  bool has_begun = false;       // all have their first table already
  int ranks_per_process = 1;    // on one thread
  int least_decided = 0;        // stops of each rank that must succeed
};

enum class What : std::uint8_t {
  // What ranks and the arbiter do.
  kBegin,
  kSkip,
  kConnect,
  kSend,
  kSendFails,
  kHear,
  kHearEnd,
  kClock,
  kTake,
  kWorkerClock,
  kRestart,
  kTime,
  // What happens to them.
  kTakeAndDie,
  kTimeLong,
  kKillRank,
  kKillWorker,
  kKillKeeper,
  kStopRank,
  kStopWorker,
  kGoOnRank,
  kGoOnWorker,
  kCut,
  kStranger,
  kAbort,
};
inline constexpr const char* kWhatNames[] = {"begin",
                                             "skip",
                                             "connect",
                                             "send",
                                             "send fails",
                                             "hear",
                                             "hear end",
                                             "clock",
                                             "take",
                                             "worker clock",
                                             "restart",
                                             "time",
                                             "take and die after",
                                             "long time",
                                             "kill rank",
                                             "kill worker",
                                             "kill keeper",
                                             "stop rank",
                                             "stop worker",
                                             "go on rank",
                                             "go on worker",
                                             "cut",
                                             "stranger",
                                             "abort"};

struct Action {
  What what;
  std::uint8_t which = 0;
  std::uint8_t how = 0;
};

struct Explored;  // reads private members

class AgreeWorld final : private Outlet {
 public:
  explicit AgreeWorld(const Setup& setup) : setup_(&setup), left_(setup.budget) {
    const int comms = setup.second == Second::kNone ? 1 : 2;
    for (int i = 0; i < comms * setup.num_ranks; ++i) ranks_.emplace_back(make_rank(i));
    for (const Rank& rank : ranks_) {
      if (rank.process >= static_cast<int>(processes_.size())) processes_.emplace_back();
    }
    worker_.emplace_back(kJob, limits_);
    for (std::size_t i = 0; i < processes_.size(); ++i) {
      const bool is_last = i + 1 == processes_.size() && setup.calls_of_last != "=";
      programs_->push_back(
          program(static_cast<int>(i), is_last ? setup.calls_of_last : setup.calls));
      if (setup.has_begun) run(static_cast<int>(i));
    }
  }
  AgreeWorld(const AgreeWorld&) = default;
  AgreeWorld& operator=(const AgreeWorld&) = default;

  static const char* name_of(const Action& action) {
    return kWhatNames[static_cast<std::size_t>(action.what)];
  }
  std::vector<Action> actions() const;
  void act(const Action& action);
  /// What is wrong; null when nothing is.
  const char* wrong() const;
  /// What is wrong with a world in which nothing can happen any more.
  const char* wrong_at_end() const;
  /// Equal for worlds that cannot be told apart from here on.
  std::string state() const;
  std::vector<Action> path;

 private:
  friend struct Explored;

  /// What the profiler tells of one communicator, as it is shipped, in a world that is copied.
  struct Marks {
    CallMarks marks;
    Marks() { marks.begin(true); }
    Marks(const Marks& other) { *this = other; }
    Marks& operator=(const Marks& other) {
      marks.bits = other.marks.bits.load();
      marks.kept = other.marks.kept;
      return *this;
    }
    ~Marks() = default;
  };
  struct Rank {
    Ballot ballot;
    std::uint64_t comm;
    int number;  // in its communicator
    int process;
    bool begun = false;  // its `init`
    bool is_voting = false;
    bool is_at_stop = false;       // and has not begun to vote
    bool has_passed_stop = false;  // in the call that it is in
    bool has_left = false;         // its communicator is no more
    bool is_aborted = false;
    std::uint64_t connection = 0;        // 0: none
    std::vector<Verdict> verdicts = {};  // of its rounds
    std::vector<Stops> stops = {};       // none or one: it has no table to replace
    Marks marks = {};
    std::vector<std::uint64_t> used = {};  // for each of its calls; 0: NCCL's own choice
  };
  struct Process {
    bool dead = false;
    bool stopped = false;
    std::size_t at = 0;  // in its program
  };
  struct Step {
    char what;
    int rank;
  };
  struct Wire {
    Connection id;
    int rank;
    bool accepted = false;
    bool cut = false;  // nothing arrives any more
    bool rank_open = true;
    bool worker_open = true;
    bool end_for_rank = false;  // after what is in `down`
    bool end_for_worker = false;
    std::deque<Vote> up = {};
    std::deque<Reply> down = {};
  };
  struct Sent {
    Connection to;
    Reply reply;
  };

  bool log(const Logged& table) override {
    if (setup_->log_is_full) return false;
    for (Logged& slot : log_) {
      if (slot.round.comm != table.round.comm) continue;
      slot = table;
      return true;
    }
    log_.push_back(table);
    return true;
  }
  void send(Connection to, const Reply& reply) override { sent_.push_back({to, reply}); }
  std::uint64_t draw() override { return ++draws_; }
  void decided(const RoundKey&, std::uint32_t, const Reply&) override {}

  const char* propose(const Vote& first, Reply* question) override {
    write_proposal(first, question);
    return nullptr;
  }
  void write_proposal(const Vote& first, Reply* question) const {
    const bool is_first = first.round.number == 0;
    question->change = Change::kNewTable;
    question->next_stop = is_first ? setup_->first_stop : first.fields[1] + setup_->gap_calls;
    question->span_calls = setup_->span_calls;
  }

  Rank make_rank(int index) const {
    const int number = index % setup_->num_ranks;
    const bool is_second = index >= setup_->num_ranks;
    const bool has_own_processes =
        setup_->second == Second::kShrinks || setup_->second == Second::kOtherProcesses;
    const int process = (has_own_processes ? index : number) / setup_->ranks_per_process;
    std::uint64_t comm = is_second ? kOtherComm : kComm;
    Vote vote;
    vote.num_ranks = static_cast<std::uint32_t>(setup_->num_ranks);
    vote.rank = number;
    vote.fields[2] = number == setup_->differs ? 2 : 1;
    if (setup_->second == Second::kShrinks) {
      Ids ids;  // of this process, which was a member of the parent
      ids.note(kComm);
      comm = id_of_shrunk(kComm);
      if (ids.note(comm)) std::snprintf(vote.problem, sizeof vote.problem, "its id is not unique");
    }
    vote.round = {kJob, comm, 0};
    vote.nonce = static_cast<std::uint64_t>(index) + 1;
    Rank rank = {Ballot(vote, limits_, limits_.vote_ms / 2, now_ms_), comm, number, process};
    if (!setup_->has_begun) return rank;
    Reply agreed;
    agreed.question = 1;
    write_proposal(vote, &agreed);
    rank.begun = true;
    rank.verdicts.push_back(Verdict::kTable);
    rank.stops.push_back(begin_stops(comm, agreed));
    return rank;
  }
  Stops begin_stops(std::uint64_t comm, const Reply& agreed) const {
    Stops stops(comm, table_of(agreed), agreed);
    if (setup_->ranks_per_process > 1) stops.end_voting();  // the second context of one id
    return stops;
  }
  /// The question stands for the table.
  static const DecisionTable* table_of(const Reply& proposal) {
    return reinterpret_cast<const DecisionTable*>(proposal.question);
  }
  std::vector<Step> program(int process, const std::string& calls) const {
    std::vector<Step> steps;
    for (const char what : calls) {
      for (std::size_t i = 0; i < ranks_.size(); ++i) {
        const bool is_meant = communicator_of(i) == (what == 'b' ? 1 : 0);
        if (ranks_[i].process == process && is_meant) steps.push_back({what, static_cast<int>(i)});
      }
    }
    return steps;
  }
  void run(int process);
  int communicator_of(std::size_t rank) const { return static_cast<int>(rank) / setup_->num_ranks; }
  bool is_listening() const { return !worker_.empty() || keeper_lives_; }
  Wire* find(Connection id) {
    for (Wire& wire : wires_) {
      if (wire.id == id) return &wire;
    }
    return nullptr;
  }
  const Wire* find(Connection id) const { return const_cast<AgreeWorld*>(this)->find(id); }

  std::uint64_t next_deadline() const;
  bool is_quiet(const std::vector<Action>& found) const;
  void close_by_rank(Rank* rank);
  void after(Rank* rank);
  void deliver(std::size_t count);
  void kill_worker();
  void sweep_wires();

  const Setup* setup_;
  Budget left_;
  Limits limits_;
  std::uint64_t now_ms_ = 1'000;
  std::vector<Rank> ranks_;
  std::vector<Process> processes_;
  std::shared_ptr<std::vector<std::vector<Step>>> programs_ =
      std::make_shared<std::vector<std::vector<Step>>>();
  std::vector<Rounds> worker_;  // none or one
  bool worker_stopped_ = false;
  bool is_stranger_ = false;
  bool keeper_lives_ = true;
  std::vector<Logged> log_;
  std::deque<Wire> wires_;
  std::vector<Sent> sent_;
  Connection connections_ = 0;
  std::uint64_t draws_ = 100;
  std::uint64_t worker_clock_ms_ = ~std::uint64_t{0};
  int idle_ = 0;  // steps of the clock since the worker last did something
  bool was_long_ = false;
  bool arbiter_was_lost_ = false;
};

struct Explored {
  static std::uint64_t next_of(const Rounds& rounds) {
    std::uint64_t next = ~std::uint64_t{0};
    for (const auto& [key, round] : rounds.rounds_) {
      if (round.state == Rounds::State::kOpen || round.state == Rounds::State::kAsking) {
        next = std::min(next, round.ends_ms);
      }
    }
    return next;
  }
  /// The next time at which a ballot does something by itself.
  static std::uint64_t next_of(const Ballot& ballot, std::uint64_t now_ms) {
    if (ballot.step == Ballot::Step::kDone) return ~std::uint64_t{0};
    std::uint64_t next = ballot.until_ms;
    if (ballot.step == Ballot::Step::kConnect && ballot.at_ms > now_ms) {
      next = std::min(next, ballot.at_ms);
    }
    return next;
  }
  /// It has asked in vain so many times.
  static void wear_out(Ballot* ballot, std::uint64_t asks) {
    if (ballot->has_confirmed()) ballot->asks_left -= std::min(ballot->asks_left, asks);
  }
  static void put(std::string* out, std::uint64_t number) {
    for (; number >= 0x80; number >>= 7) out->push_back(static_cast<char>(number | 0x80));
    out->push_back(static_cast<char>(number));
  }
  static void put_time(std::string* out, std::uint64_t time, std::uint64_t now) {
    put(out, time == ~std::uint64_t{0} ? 0
             : time >= now             ? 2 * (time - now) + 1
                                       : 2 * (now - time) + 2);
  }
  static void put(std::string* out, const Ballot& ballot, std::uint64_t now) {
    put(out, static_cast<std::uint64_t>(ballot.step));
    put(out, static_cast<std::uint64_t>(ballot.vote.kind));
    put(out, ballot.vote.question);
    put_time(out, ballot.at_ms > now ? ballot.at_ms : now, now);
    put_time(out, ballot.until_ms, now);
    put(out, ballot.asks_left);
  }
  static void put(std::string* out, const Stops& stops) {
    put(out, stops.digest_);
    for (const std::uint64_t number :
         {stops.calls_, stops.number_, stops.earliest_, stops.at_, std::uint64_t{stops.failures_},
          std::uint64_t{stops.votes_}, reinterpret_cast<std::uint64_t>(stops.table_)}) {
      put(out, number);
    }
  }
  template <typename Place>
  static void put(std::string* out, const Rounds& rounds, std::uint64_t now, Place place) {
    for (const auto& [key, round] : rounds.rounds_) {
      put(out, key.comm);
      put(out, key.number);
      put(out, static_cast<std::uint64_t>(round.state));
      put(out, round.question);
      put(out, round.first.num_ranks);
      put(out, round.first.fields[2]);
      put(out, round.first.fields[0]);
      put(out, round.first.fields[1]);
      if (round.state == Rounds::State::kTable || round.state == Rounds::State::kAbstain) continue;
      put_time(out, round.ends_ms, now);
      for (const auto& [nonce, has_confirmed] : round.voters) {
        put(out, nonce);
        put(out, has_confirmed);
      }
      for (const auto& [connection, nonce] : round.connections) {
        put(out, place(connection));
        put(out, nonce);
      }
    }
  }
};

inline std::uint64_t AgreeWorld::next_deadline() const {
  std::uint64_t next = ~std::uint64_t{0};
  for (const Rank& rank : ranks_) {
    const Process& process = processes_[static_cast<std::size_t>(rank.process)];
    if (rank.is_voting && !process.dead && !process.stopped) {
      next = std::min(next, Explored::next_of(rank.ballot, now_ms_));
    }
  }
  if (!worker_.empty() && !worker_stopped_) next = std::min(next, worker_clock_ms_);
  return next;
}

inline std::vector<Action> AgreeWorld::actions() const {
  std::vector<Action> found;
  const auto add = [&found](What what, std::size_t which = 0, std::size_t how = 0) {
    found.push_back({what, static_cast<std::uint8_t>(which), static_cast<std::uint8_t>(how)});
  };
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    const Rank& rank = ranks_[i];
    const Process& process = processes_[static_cast<std::size_t>(rank.process)];
    if (process.dead || process.stopped) continue;
    if (!rank.begun && rank.number == setup_->never_comes) continue;
    if (!rank.begun || rank.is_at_stop) add(What::kBegin, i);
    if (rank.is_at_stop && left_.skips > 0) add(What::kSkip, i);
    if (!rank.is_voting) continue;
    const Wire* wire = find(rank.connection);
    switch (rank.ballot.step) {
      case Ballot::Step::kConnect:
        if (rank.ballot.at_ms <= now_ms_) add(What::kConnect, i);
        break;
      case Ballot::Step::kSend:
        add(What::kSend, i);
        if (wire->end_for_rank) add(What::kSendFails, i);
        break;
      case Ballot::Step::kListen:
        if (!wire->down.empty()) {
          add(What::kHear, i);
        } else if (wire->end_for_rank) {
          add(What::kHearEnd, i);
        }
        break;
      case Ballot::Step::kDone:
        continue;
    }
    if (Explored::next_of(rank.ballot, now_ms_) <= now_ms_) add(What::kClock, i);
  }
  if (!worker_.empty() && !worker_stopped_) {
    for (std::size_t i = 0; i < wires_.size(); ++i) {
      const Wire& wire = wires_[i];
      if (wire.worker_open && (!wire.up.empty() || wire.end_for_worker)) add(What::kTake, i);
    }
    if (worker_clock_ms_ <= now_ms_) add(What::kWorkerClock);
  }
  if (worker_.empty() && keeper_lives_) add(What::kRestart);
  const bool is_quiet = found.empty();
  bool is_open = false, is_anything_stopped = worker_stopped_;
  for (const Rank& rank : ranks_) {
    is_open |= rank.is_voting && !processes_[static_cast<std::size_t>(rank.process)].dead;
  }
  for (const Process& process : processes_) is_anything_stopped |= process.stopped && !process.dead;
  if (is_open && (is_quiet || left_.late > 0) && next_deadline() != ~std::uint64_t{0}) {
    // Whoever asks again and again, each time as before: a few times stand for all.
    const bool is_answered = is_listening() && !is_stranger_;
    if (is_answered && (idle_ < 1 || !is_anything_stopped)) add(What::kTime, 0, is_quiet ? 0 : 1);
  }
  if (is_open && is_quiet && (!is_listening() || is_stranger_)) add(What::kTimeLong);
  if (is_open && is_quiet && is_anything_stopped && !was_long_) add(What::kTimeLong);
  for (std::size_t i = 0; i < processes_.size(); ++i) {
    const Process& process = processes_[i];
    const bool is_voting = std::any_of(ranks_.begin(), ranks_.end(), [i](const Rank& rank) {
      return rank.process == static_cast<int>(i) && rank.is_voting;
    });
    if (process.dead) continue;
    if (process.stopped) {
      add(What::kGoOnRank, i);
    } else if (left_.stops > 0 && is_voting) {
      add(What::kStopRank, i);
    }
    if (left_.rank_kills > 0 && is_voting) add(What::kKillRank, i);
  }
  for (std::size_t i = 0; i < ranks_.size() && left_.aborts > 0; ++i) {
    const Rank& rank = ranks_[i];
    const Process& process = processes_[static_cast<std::size_t>(rank.process)];
    const bool is_in_call = rank.is_voting && !rank.stops.empty();
    if (is_in_call && !process.dead && !process.stopped) add(What::kAbort, i);
  }
  if (!is_open && is_quiet) return found;
  if (!worker_.empty() && !is_stranger_) {
    if (left_.worker_kills > 0) {
      add(What::kKillWorker);
      for (std::size_t i = 0; i < wires_.size() && !worker_stopped_; ++i) {
        const Wire& wire = wires_[i];
        if (!wire.worker_open || (wire.up.empty() && !wire.end_for_worker)) continue;
        AgreeWorld copy = *this;  // how many effects has it?
        copy.act({What::kTakeAndDie, static_cast<std::uint8_t>(i), 255});
        for (std::size_t how = 0; how <= copy.sent_.size(); ++how) add(What::kTakeAndDie, i, how);
      }
    }
    if (worker_stopped_) {
      add(What::kGoOnWorker);
    } else if (left_.stops > 0) {
      add(What::kStopWorker);
    }
  }
  if (keeper_lives_ && left_.keeper_kills > 0) add(What::kKillKeeper);
  if (!is_listening() && left_.strangers > 0) add(What::kStranger);
  if (left_.cuts > 0) {
    for (std::size_t i = 0; i < wires_.size(); ++i) {
      // Bits: lose what goes up, what comes down; the rank learns of it, the worker does.
      for (std::size_t how = 0; how < 16 && !wires_[i].cut; ++how) add(What::kCut, i, how);
    }
  }
  return found;
}

/// Hands over the first `count` of the replies that the worker wants to send.
inline void AgreeWorld::deliver(std::size_t count) {
  for (std::size_t i = 0; i < sent_.size() && i < count; ++i) {
    Wire* wire = find(sent_[i].to);
    if (wire != nullptr && !wire->cut && wire->rank_open && wire->worker_open) {
      wire->down.push_back(sent_[i].reply);
    }
  }
  if (count == 255) return;  // they are only counted
  sent_.clear();
}

inline void AgreeWorld::kill_worker() {
  worker_.clear();
  worker_stopped_ = false;
  worker_clock_ms_ = ~std::uint64_t{0};
  for (Wire& wire : wires_) {
    if (!wire.accepted && keeper_lives_) continue;  // it waits for the next worker
    wire.worker_open = false;
    wire.up.clear();
    wire.end_for_rank |= !wire.cut;
  }
  arbiter_was_lost_ |= !keeper_lives_;
}

inline void AgreeWorld::close_by_rank(Rank* rank) {
  if (Wire* wire = find(rank->connection)) {
    wire->rank_open = false;
    wire->down.clear();
    wire->end_for_worker |= !wire->cut;
  }
  rank->connection = 0;
}

/// What a rank does once its ballot has changed.
inline void AgreeWorld::after(Rank* rank) {
  const Ballot::Step step = rank->ballot.step;
  if (step == Ballot::Step::kConnect || step == Ballot::Step::kDone) close_by_rank(rank);
  if (step != Ballot::Step::kDone) return;
  const Verdict verdict = rank->ballot.verdict;
  rank->verdicts.push_back(verdict);
  rank->is_voting = false;
  rank->has_left |= verdict == Verdict::kFailed;
  if (rank->stops.empty()) {  // `init`
    const Reply& agreed = rank->ballot.proposal;
    if (verdict == Verdict::kTable) rank->stops.push_back(begin_stops(rank->comm, agreed));
  } else if (verdict == Verdict::kTable) {
    rank->stops[0].agreed(rank->ballot.proposal, table_of(rank->ballot.proposal));
  } else if (verdict == Verdict::kAbstain) {
    rank->stops[0].failed();
  }
  rank->has_passed_stop = rank->verdicts.size() > 1;
  run(rank->process);
}

/// The calls of a process up to where it has to wait.
inline void AgreeWorld::run(int process) {
  for (const Rank& rank : ranks_) {
    if (rank.process == process && rank.verdicts.empty()) return;  // in `init`
  }
  const std::vector<Step>& steps = (*programs_)[static_cast<std::size_t>(process)];
  for (std::size_t& at = processes_[static_cast<std::size_t>(process)].at; at < steps.size();
       ++at) {
    Rank& rank = ranks_[static_cast<std::size_t>(steps[at].rank)];
    const char what = steps[at].what;
    if (rank.has_left) continue;
    if (what == '-') {
      for (Stops& stops : rank.stops) stops.end_voting();
      continue;
    }
    if (rank.stops.empty()) {
      if (what != 's') rank.used.push_back(0);
      continue;
    }
    Stops& stops = rank.stops[0];
    CallMarks& marks = rank.marks.marks;
    if (!rank.has_passed_stop) marks.set_captured(what == 'c');
    rank.is_at_stop = !rank.has_passed_stop && stops.is_due(marks.begins_group());
    if (rank.is_at_stop) return;
    rank.has_passed_stop = false;
    if (what != 's') rank.used.push_back(reinterpret_cast<std::uint64_t>(stops.table()));
    stops.answered(4, 1024, marks.pass());
    if (what != 's') marks.set_launched(nullptr);
  }
}

/// Forgets connections that nobody holds any more.
inline void AgreeWorld::sweep_wires() {
  const auto is_over = [](const Wire& wire) {
    const bool worker_learns = wire.worker_open && (wire.end_for_worker || !wire.up.empty());
    return !wire.rank_open && !worker_learns && (wire.accepted || !wire.worker_open || wire.cut);
  };
  wires_.erase(std::remove_if(wires_.begin(), wires_.end(), is_over), wires_.end());
}

inline void AgreeWorld::act(const Action& action) {
  path.push_back(action);
  Rank* rank = action.which < ranks_.size() ? &ranks_[action.which] : nullptr;
  switch (action.what) {
    case What::kBegin:
      rank->is_voting = true;
      if (rank->is_at_stop) {
        Vote vote = rank->ballot.vote;
        rank->stops[0].write_vote(&vote);
        vote.nonce += 100;
        rank->is_at_stop = false;
        rank->ballot = Ballot(vote, limits_, rank->stops[0].patience_ms(limits_), now_ms_);
      } else {
        rank->begun = true;
        rank->ballot = Ballot(rank->ballot.vote, limits_, limits_.vote_ms / 2, now_ms_);
      }
      break;
    case What::kSkip:
      --left_.skips;
      rank->is_at_stop = false;
      rank->verdicts.push_back(Verdict::kAbstain);
      rank->stops[0].failed();
      rank->has_passed_stop = true;
      run(rank->process);
      break;
    case What::kConnect:
      if (is_listening()) {
        rank->connection = ++connections_;
        wires_.push_back({rank->connection, action.which});
        rank->ballot.worked(now_ms_);
      } else {
        rank->ballot.failed(now_ms_);
        after(rank);
      }
      break;
    case What::kSend: {
      Wire* wire = find(rank->connection);
      if (!wire->cut && wire->worker_open) wire->up.push_back(rank->ballot.vote);
      rank->ballot.worked(now_ms_);
      break;
    }
    case What::kSendFails:
    case What::kHearEnd:
      rank->ballot.failed(now_ms_);
      after(rank);
      break;
    case What::kHear: {
      Wire* wire = find(rank->connection);
      const Reply reply = wire->down.front();
      wire->down.pop_front();
      rank->ballot.hear(reply, now_ms_);
      after(rank);
      break;
    }
    case What::kClock:
      rank->ballot.look_at_clock(now_ms_);
      after(rank);
      break;
    case What::kTake:
    case What::kTakeAndDie: {
      Wire& wire = wires_[action.which];
      wire.accepted = true;
      idle_ = 0;
      if (!wire.up.empty()) {
        const Vote vote = wire.up.front();
        wire.up.pop_front();
        worker_[0].hear(wire.id, vote, now_ms_, this);
      } else {
        wire.worker_open = false;
        worker_[0].gone(wire.id, this);
      }
      const bool dies = action.what == What::kTakeAndDie;
      deliver(dies ? action.how : sent_.size());
      if (dies && action.how != 255) {
        --left_.worker_kills;
        kill_worker();
      } else if (!dies) {
        worker_clock_ms_ = Explored::next_of(worker_[0]);
      }
      break;
    }
    case What::kWorkerClock:
      idle_ = 0;
      worker_clock_ms_ = worker_[0].look_at_clock(now_ms_, this);
      deliver(sent_.size());
      break;
    case What::kRestart:
      worker_.emplace_back(kJob, limits_);
      for (const Logged& table : log_) worker_[0].restore(table);
      break;
    case What::kTime:
      left_.late -= action.how;
      now_ms_ = std::max(now_ms_, next_deadline());
      ++idle_;
      break;
    case What::kTimeLong: {
      // As long as an answer may take; whoever has confirmed asks in vain all the time.
      const bool is_lost = !is_listening() || is_stranger_;
      was_long_ = true;
      now_ms_ += limits_.answer_ms;
      for (Rank& each : ranks_) {
        if (processes_[static_cast<std::size_t>(each.process)].stopped) continue;
        Explored::wear_out(&each.ballot,
                           is_lost ? ~std::uint64_t{0} : limits_.answer_ms / limits_.ask_ms);
      }
      break;
    }
    case What::kKillRank:
      --left_.rank_kills;
      processes_[action.which].dead = true;
      processes_[action.which].stopped = false;
      for (Rank& each : ranks_) {
        if (each.process == action.which) close_by_rank(&each);
      }
      if (action.which == setup_->arbiter_in_process) {
        keeper_lives_ = false;
        kill_worker();
        arbiter_was_lost_ = false;  // of the job one process was lost, which was no member
      }
      break;
    case What::kKillWorker:
      --left_.worker_kills;
      kill_worker();
      break;
    case What::kKillKeeper:
      --left_.keeper_kills;
      keeper_lives_ = false;
      arbiter_was_lost_ |= worker_.empty();
      if (worker_.empty()) kill_worker();  // and what waited for the next one
      break;
    case What::kStopRank:
      --left_.stops;
      processes_[action.which].stopped = true;
      break;
    case What::kGoOnRank:
      processes_[action.which].stopped = false;
      break;
    case What::kStopWorker:
      --left_.stops;
      worker_stopped_ = true;
      break;
    case What::kGoOnWorker:
      worker_stopped_ = false;
      idle_ = 0;
      break;
    case What::kCut: {
      --left_.cuts;
      Wire& wire = wires_[action.which];
      wire.cut = true;
      if ((action.how & 1) != 0) wire.up.clear();
      if ((action.how & 2) != 0) wire.down.clear();
      wire.end_for_rank |= (action.how & 4) != 0;
      wire.end_for_worker |= (action.how & 8) != 0;
      break;
    }
    case What::kStranger:
      --left_.strangers;
      is_stranger_ = true;
      worker_.emplace_back(kOtherJob, limits_);
      break;
    case What::kAbort:
      --left_.aborts;
      rank->has_left = true;
      rank->is_aborted = true;
      rank->ballot.leave();
      after(rank);
      break;
  }
  sweep_wires();
}

inline const char* AgreeWorld::wrong() const {
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    const Rank& rank = ranks_[i];
    bool all_live = true;
    for (std::size_t j = 0; j < ranks_.size(); ++j) {
      const Rank& other = ranks_[j];
      if (communicator_of(i) != communicator_of(j)) continue;
      all_live &= !processes_[static_cast<std::size_t>(other.process)].dead;
      for (std::size_t k = 0; k < std::min(rank.verdicts.size(), other.verdicts.size()); ++k) {
        if (rank.verdicts[k] == Verdict::kTable && other.verdicts[k] == Verdict::kAbstain) {
          return "table beside abstain";
        }
      }
      for (std::size_t k = 0; k < std::min(rank.used.size(), other.used.size()); ++k) {
        if (rank.used[k] != other.used[k]) return "two tables for one call";
      }
    }
    if (rank.verdicts.empty() || rank.verdicts.back() != Verdict::kFailed) continue;
    if (all_live && !arbiter_was_lost_ && !rank.is_aborted) {
      return "it failed while all members and the arbiter live";
    }
  }
  return nullptr;
}

inline const char* AgreeWorld::wrong_at_end() const {
  const Budget& budget = setup_->budget;
  const bool is_disturbed = budget.rank_kills + budget.worker_kills + budget.keeper_kills +
                                budget.stops + budget.cuts + budget.late + budget.aborts +
                                budget.skips >
                            0;
  const bool calls_differ = setup_->calls_of_last != "=";
  const bool can_fail = is_disturbed || setup_->differs >= 0 || setup_->never_comes >= 0 ||
                        setup_->second != Second::kNone || setup_->log_is_full || calls_differ;
  for (const Rank& rank : ranks_) {
    const Process& process = processes_[static_cast<std::size_t>(rank.process)];
    if (process.dead || !rank.begun) continue;
    const std::size_t steps = (*programs_)[static_cast<std::size_t>(rank.process)].size();
    if (rank.is_voting || process.at < steps) {
      return "it hangs";
    }
    if (rank.has_left) continue;
    int decided = 0;
    for (std::size_t i = 0; i < rank.verdicts.size(); ++i) {
      const bool is_decided = rank.verdicts[i] == Verdict::kTable;
      if (i > 0) decided += is_decided;
      if (!can_fail && !is_decided) return "nothing went wrong, and it has no table";
    }
    if (decided < setup_->least_decided) return "too few of its stops were decided";
    for (const Rank& other : ranks_) {
      const bool is_alive = !processes_[static_cast<std::size_t>(other.process)].dead;
      if (other.comm != rank.comm || !is_alive || other.has_left || calls_differ) continue;
      if (rank.stops.empty() || other.stops.empty()) continue;
      if (rank.stops[0].number() != other.stops[0].number() ||
          rank.stops[0].index() != other.stops[0].index()) {
        return "its ranks go to different stops";
      }
    }
  }
  return nullptr;
}

inline std::string AgreeWorld::state() const {
  std::string out;
  const auto place = [this](Connection id) -> std::uint64_t {
    for (std::size_t i = 0; i < wires_.size(); ++i) {
      if (wires_[i].id == id) return i + 1;
    }
    return 0;
  };
  const auto put = [&out](std::uint64_t number) { Explored::put(&out, number); };
  for (const Rank& rank : ranks_) {
    put(static_cast<std::uint64_t>(rank.begun) | static_cast<std::uint64_t>(rank.is_voting) << 1 |
        static_cast<std::uint64_t>(rank.is_at_stop) << 2 |
        static_cast<std::uint64_t>(rank.has_passed_stop) << 3 |
        static_cast<std::uint64_t>(rank.has_left) << 4 |
        static_cast<std::uint64_t>(rank.is_aborted) << 5);
    put(rank.verdicts.size());
    for (const Verdict verdict : rank.verdicts) put(static_cast<std::uint64_t>(verdict));
    put(rank.used.size());
    for (const std::uint64_t table : rank.used) put(table);
    for (const Stops& stops : rank.stops) Explored::put(&out, stops);
    put(rank.marks.marks.bits);
    if (!rank.is_voting || processes_[static_cast<std::size_t>(rank.process)].dead) continue;
    put(place(rank.connection));
    Explored::put(&out, rank.ballot, now_ms_);
  }
  for (const Process& process : processes_) {
    put(static_cast<std::uint64_t>(process.dead) |
        static_cast<std::uint64_t>(process.stopped) << 1 | process.at << 2);
  }
  for (const Wire& wire : wires_) {
    put(static_cast<std::uint64_t>(wire.rank));
    put(static_cast<std::uint64_t>(wire.accepted) | static_cast<std::uint64_t>(wire.cut) << 1 |
        static_cast<std::uint64_t>(wire.rank_open) << 2 |
        static_cast<std::uint64_t>(wire.worker_open) << 3 |
        static_cast<std::uint64_t>(wire.end_for_rank) << 4 |
        static_cast<std::uint64_t>(wire.end_for_worker) << 5);
    put(wire.up.size());
    for (const Vote& vote : wire.up) {
      put(static_cast<std::uint64_t>(vote.kind));
      put(vote.question);
      put(vote.nonce);
    }
    put(wire.down.size());
    for (const Reply& reply : wire.down) {
      put(static_cast<std::uint64_t>(reply.kind));
      put(reply.question);
    }
  }
  put(worker_.size());
  if (!worker_.empty()) Explored::put(&out, worker_[0], now_ms_, place);
  put(static_cast<std::uint64_t>(worker_stopped_) | static_cast<std::uint64_t>(keeper_lives_) << 1 |
      static_cast<std::uint64_t>(was_long_) << 2 | static_cast<std::uint64_t>(is_stranger_) << 3 |
      static_cast<std::uint64_t>(arbiter_was_lost_) << 4);
  put(static_cast<std::uint64_t>(std::min(idle_, 1)));
  for (const Logged& table : log_) {
    put(table.round.comm);
    put(table.round.number);
    put(table.question);
  }
  for (const int left : {left_.rank_kills, left_.worker_kills, left_.keeper_kills, left_.stops,
                         left_.cuts, left_.late, left_.strangers, left_.aborts, left_.skips}) {
    put(static_cast<std::uint64_t>(left));
  }
  return out;
}

}  // namespace dynamiccl
