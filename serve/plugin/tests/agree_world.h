// A small world for the vote of `agree/`: ranks on hosts, the arbiter's keeper and worker, and what
// a cluster does to them. Its machines are the shipped ones; what happens next is a choice.
//
// Each process has one thread that makes calls, one after the other; at a stop it waits inside its
// call. A call's kernel waits for nobody: a rank may be any number of calls ahead, as NCCL's are.
// Processes are killed, and stand still (SIGSTOP, a frozen VM) while their clock goes on.
// Connections hold what was sent and not yet read; a cut loses any end of it, and either side
// learns of it or does not. The kernel accepts connections while keeper or worker live; a new
// worker finds those that the killed one had not accepted. A worker may be killed between two of
// its effects: after it has logged and before it has told anybody. Time passes when nothing else
// can happen, or before a message that is late.
#pragma once

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "agree/ballot.h"
#include "agree/rounds.h"
#include "agree/stops.h"
#include "identity/ids.h"

namespace dynamiccl {

inline constexpr std::uint64_t kJob = 1, kOtherJob = 2;

/// 64 bits stand for a state: two of three million are taken for one with a probability of 2e-7.
struct State {
  std::uint64_t digest = 0;

  template <typename... Values>  // numbers and pointers
  void put(Values... values) {
    (mix((std::uint64_t)(values)), ...);
  }
  void mix(std::uint64_t number) {
    digest = (digest ^ number) * 0x9e3779b97f4a7c15U + 1;
    digest ^= digest >> 32;
  }
};

struct Setup {
  const char* name;
  int num_ranks = 2;
  /// What may happen, once for each letter:
  ///   r, w, k  a rank's process, the worker or the keeper is killed
  ///   s        a rank's process or the worker stands still, perhaps for almost the answer limit
  ///   c        a connection is cut
  ///   l        the clock goes on although something could happen: a message is late
  ///   x        another job's arbiter comes to the address of ours, once both processes are dead
  ///   a        a communicator is aborted inside a stop
  ///   o        a rank leaves a stop out: it has waited enough, or has no descriptor
  ///   u        by a word: a rank cannot use it (no descriptor, a full tmpfs, another /dev/shm)
  ///   t        by a word: a rank's time is up
  /// and what is so from the beginning:
  ///   d, n, f  the last rank differs, or never comes to `init`; the log is full
  ///   2, p     the same processes make another communicator at once, or others do
  ///   h        there are two disjoint shrinks of one parent, which have one id
  ///   i        the arbiter is not outside the job but dies with the last process: a mistake
  std::string with = "";
  /// After `init`, what each process calls: `a` a call of its communicator, `b` of its second one,
  /// `s` one that is only simulated and `c` one that is captured; `-`: it sees a shrink. All calls
  /// are equal, since others are told apart. `|` before them: all have their first table already.
  std::string calls = "";
  std::string calls_of_last = "=";  // of the last process; `=`: the same
  std::uint64_t first_stop = 1;
  int least_decided = 0;  // rounds of each rank that must succeed
  std::uint64_t span_calls = 1;
  std::uint64_t gap_calls = 1;        // from a stop that succeeds to the next
  std::size_t ranks_per_process = 1;  // on one thread

  bool is(char letter) const { return with.find(letter) != std::string::npos; }
  bool has_begun() const { return calls[0] == '|'; }
  int num_communicators() const { return is('2') || is('p') || is('h') ? 2 : 1; }
  bool is_last(const Vote& vote) const { return vote.rank + 1 == num_ranks; }

  /// For `init`, of any communicator's ranks.
  Vote vote_of(int index) const {
    constexpr std::uint64_t kComm = 77, kOtherComm = 78;
    Vote vote;
    vote.num_ranks = static_cast<std::uint32_t>(num_ranks);
    vote.rank = index % num_ranks;
    vote.fields[2] = is('d') && is_last(vote) ? 2 : 1;
    vote.round = {kJob, index < num_ranks ? kComm : kOtherComm, 0};
    vote.nonce = static_cast<std::uint64_t>(index) + 1;
    if (!is('h')) return vote;
    Ids ids;  // of this process, which was a member of the parent
    ids.note(kComm);
    vote.round.comm = id_of_shrunk(kComm);
    if (ids.note(vote.round.comm)) vote.problem[0] = '?';
    return vote;
  }
};

/// Atomics, in a world that is copied.
template <typename Atomics>
struct Copied : Atomics {
  Copied() : Atomics{} {}
  Copied(const Copied& other) : Atomics{} { *this = other; }
  Copied& operator=(const Copied& other) {
    std::memcpy(static_cast<void*>(this), static_cast<const void*>(&other), sizeof other);
    return *this;
  }
};

/// All that can happen in a world is gone through, and one of it happens, or nothing.
struct World {
  struct Event {
    const char* what;
    std::size_t which, how;  // which part of the world, and how
  };
  std::vector<Event> path;  // what has happened

  bool has(char letter) const { return left_.find(letter) != std::string::npos; }
  /// Without a `letter` any number of times.
  template <typename Effect>
  void may_once(char letter, const char* what, std::size_t which, std::size_t how,
                const Effect& effect) {
    if ((letter != 0 && !has(letter)) || count_++ != chosen_) return;
    path.push_back({what, which, how});
    if (letter != 0) left_.erase(left_.find(letter), 1);
    effect();
  }
  template <typename Effect>
  void may(const char* what, std::size_t which, const Effect& effect) {
    may_once(0, what, which, 0, effect);
  }

  int chosen_ = -1;
  int count_ = 0;
  std::string left_;  // of what may happen once
};

/// Named as its friends name it: it tells states apart by what nobody else may see.
struct Explored final : World, Outlet {
  explicit Explored(const Setup& setup) : setup_(&setup), worker_(Rounds(kJob, limits_)) {
    for (int i = 0; i < setup.num_communicators() * setup.num_ranks; ++i) {
      const bool has_own_thread = setup.is('p') || setup.is('h');
      const auto thread = static_cast<std::size_t>(has_own_thread ? i : i % setup.num_ranks);
      ranks_.push_back({setup.vote_of(i), i >= setup.num_ranks, thread / setup.ranks_per_process});
      ranks_.back().marks.begin();
    }
    processes_.resize(ranks_.back().process + 1);
    while (setup.has_begun() && happen(0) > 0) {
    }
    for (std::size_t i = 0; i < processes_.size(); ++i) {
      const bool is_other = i + 1 == processes_.size() && setup.calls_of_last != "=";
      for (const char what : is_other ? setup.calls_of_last : setup.calls) {
        if (what != '|') processes_[i].calls.append(setup.ranks_per_process, what);
      }
      run(i);
    }
    path.clear();
    left_ = setup.with;
  }

  /// Lets the `chosen`-th of all that can happen happen; -1: none. Returns how many there are.
  int happen(int chosen) {
    chosen_ = chosen;
    count_ = 0;
    for (std::size_t i = 0; i < ranks_.size(); ++i) {
      if (processes_[ranks_[i].process].runs()) rank_goes_on(i, &ranks_[i]);
    }
    arbiter_goes_on();
    const bool is_quiet = count_ == 0;
    const bool is_open = std::any_of(ranks_.begin(), ranks_.end(), votes);
    const bool is_answered = is_listening() && !is_stranger_;
    bool is_anything_stopped = worker_stopped_;
    for (std::size_t i = 0; i < processes_.size(); ++i) {
      is_anything_stopped |= processes_[i].stopped;
      if (processes_[i].stopped) may("go on", i, [&] { processes_[i].stopped = false; });
    }
    const bool is_over = is_quiet && !is_open;
    if (worker_stopped_ && !is_over) {
      may("worker goes on", 0, [&] { worker_stopped_ = has_idled_ = false; });
    }
    // Whoever asks again and again, each time as before: a few times stand for all.
    if (is_open && is_answered && (!has_idled_ || !is_anything_stopped) && deadline() != kNoTime) {
      may_once(is_quiet ? '\0' : 'l', "time", 0, 0, [&] {
        now_ms_ = std::max(now_ms_, deadline());
        has_idled_ = true;
      });
    }
    num_usual = count_;
    if (is_open && is_quiet && (!is_answered || (is_anything_stopped && !was_long_))) {
      may("long time", 0, [&] { wait_long(is_answered); });
    }
    for (std::size_t i = 0; i < ranks_.size(); ++i) disturb(i, &ranks_[i]);
    if (!is_over) disturb_arbiter();
    const auto is_forgotten = [&](const Wire& wire) {  // nobody holds it any more
      const bool worker_learns = wire.worker_open && (wire.end_for_worker || !wire.up.empty());
      return !is_held(wire) && !worker_learns && (wire.accepted || !wire.worker_open || wire.cut);
    };
    wires_.erase(std::remove_if(wires_.begin(), wires_.end(), is_forgotten), wires_.end());
    return count_;
  }
  int num_usual = 0;  // the first of what can happen: so many are no disturbance

  /// What is wrong; null when nothing is. `is_over`: nothing can happen any more.
  const char* wrong(bool is_over) const {
    const bool calls_differ = setup_->calls_of_last != "=";
    for (const Rank& rank : ranks_) {
      const Process& process = processes_[rank.process];
      const bool is_there = is_over && !process.dead && !never_comes(rank);
      const bool goes_on = is_there && !rank.has_left;
      bool all_live = true;
      for (const Rank& other : ranks_) {
        if (rank.is_second != other.is_second) continue;
        all_live &= !processes_[other.process].dead;
        for (std::size_t k = 0; k < std::min(rank.verdicts.size(), other.verdicts.size()); ++k) {
          if (rank.verdicts[k] == Verdict::kTable && other.verdicts[k] == Verdict::kAbstain) {
            return "table beside abstain";
          }
        }
        for (std::size_t k = 0; k < std::min(rank.used.size(), other.used.size()); ++k) {
          if (rank.used[k] != other.used[k]) return "two tables for one call";
        }
        if (!goes_on || processes_[other.process].dead || other.has_left || calls_differ) continue;
        if (!rank.stops || !other.stops || next_stop(rank) == next_stop(other)) continue;
        return "its ranks go to different stops";
      }
      const bool has_failed = !is_in_init(rank) && rank.verdicts.back() == Verdict::kFailed;
      if (has_failed && all_live && !arbiter_was_lost_ && !rank.is_aborted) {
        return "it failed while all members and the arbiter live";
      }
      if (is_there && (rank.ballot || !process.calls.empty())) return "it hangs";
      if (!goes_on) continue;
      const bool can_fail = !setup_->with.empty() || calls_differ;
      const auto least = can_fail ? setup_->least_decided : static_cast<int>(rank.verdicts.size());
      const auto tables = std::count(rank.verdicts.begin(), rank.verdicts.end(), Verdict::kTable);
      if (tables < least) return "too few of its rounds were decided";
    }
    return nullptr;
  }

  /// Equal for worlds that cannot be told apart from here on.
  State state() const {
    State out;
    const auto from_now = [this](std::uint64_t ms) { return ms == kNoTime ? ms : ms - now_ms_; };
    for (const Rank& rank : ranks_) {
      out.put(rank.ballot.has_value(), rank.is_due, rank.has_left, rank.is_aborted,
              rank.marks.bits.load(), rank.verdicts.size(), rank.used.size());
      for (const Verdict verdict : rank.verdicts) out.put(verdict);
      for (const DecisionTable* table : rank.used) out.put(table);
      if (rank.stops) {
        const Stops& stops = *rank.stops;
        out.put(stops.digest_, stops.calls(), stops.number(), stops.earliest_, stops.index(),
                stops.failures_, stops.votes_, stops.table());
      }
      if (!rank.ballot) continue;
      const Ballot& ballot = *rank.ballot;
      out.put(place(rank.connection), ballot.step, ballot.vote.kind, ballot.vote.question,
              from_now(std::max(ballot.at_ms, now_ms_)), from_now(ballot.until_ms),
              ballot.asks_left);
    }
    for (const Process& each : processes_) out.put(each.dead, each.stopped, each.calls.size());
    for (const Wire& wire : wires_) {
      out.put(wire.rank, is_held(wire), wire.accepted, wire.cut, wire.worker_open,
              wire.end_for_rank, wire.end_for_worker, wire.up.size(), wire.down.size());
      for (const Vote& vote : wire.up) out.put(vote.kind, vote.question, vote.nonce);
      for (const Reply& reply : wire.down) out.put(reply.kind, reply.question);
    }
    for (const auto& [comm, table] : log_) out.put(comm, table.round.number, table.question);
    for (const char letter : left_) out.put(letter);
    out.put(wires_.size(), log_.size(), left_.size(), worker_.has_value(), worker_stopped_,
            keeper_lives_, was_long_, is_stranger_, arbiter_was_lost_, has_idled_);
    if (!worker_) return out;
    for (const auto& [key, round] : worker_->rounds_) {
      out.put(key.comm, key.number, round.state, round.question, round.first.num_ranks,
              round.first.fields[0], round.first.fields[1], round.first.fields[2]);
      if (round.state == Rounds::State::kTable || round.state == Rounds::State::kAbstain) continue;
      out.put(from_now(round.ends_ms), round.voters.size(), round.connections.size());
      for (const auto& [nonce, has_confirmed] : round.voters) out.put(nonce, has_confirmed);
      for (const auto& [connection, nonce] : round.connections) out.put(place(connection), nonce);
    }
    return out;
  }

  static constexpr std::uint64_t kNoTime = ~std::uint64_t{0};

  struct Rank {
    Vote vote;
    bool is_second;  // of the second communicator
    std::size_t process;
    bool is_due = true;                  // it has come to a round, `init` first
    std::optional<Ballot> ballot = {};   // while it votes
    Connection connection = 0;           // 0: none
    std::vector<Verdict> verdicts = {};  // of its rounds
    bool has_left = false;               // its communicator is no more
    bool is_aborted = false;
    std::optional<Stops> stops = {};              // none: it has no table to replace
    Copied<CallMarks> marks = {};                 // what the profiler tells of its calls
    std::vector<const DecisionTable*> used = {};  // for each of its calls; null: NCCL's choice
  };
  struct Process {
    bool dead = false;
    bool stopped = false;
    std::string calls = "";  // still to make
    bool runs() const { return !dead && !stopped; }
  };
  struct Wire {
    Connection id;
    std::size_t rank;
    bool accepted = false;
    bool cut = false;  // nothing arrives any more
    bool worker_open = true;
    bool end_for_rank = false;  // after what is in `down`
    bool end_for_worker = false;
    std::vector<Vote> up = {};
    std::vector<Reply> down = {};
  };

  static bool votes(const Rank& rank) { return rank.ballot.has_value(); }
  static std::pair<std::uint64_t, std::uint64_t> next_stop(const Rank& rank) {
    return {rank.stops->number(), rank.stops->index()};
  }
  static bool is_in_init(const Rank& rank) { return rank.verdicts.empty(); }
  bool never_comes(const Rank& rank) const {
    return is_in_init(rank) && setup_->is('n') && setup_->is_last(rank.vote);
  }

  /// The calls of a process up to where it has to wait.
  void run(std::size_t number) {
    for (const Rank& rank : ranks_) {
      if (rank.process == number && is_in_init(rank)) return;
    }
    std::string& calls = processes_[number].calls;
    for (; !calls.empty(); calls.erase(0, 1)) {
      const std::size_t here = setup_->ranks_per_process;
      const std::size_t second = calls[0] == 'b' ? ranks_.size() / 2 : 0;
      Rank& rank = ranks_[second + number * here + calls.size() % here];
      if (rank.stops && calls[0] == '-') rank.stops->end_voting();
      if (rank.has_left || calls[0] == '-') continue;
      rank.marks.set_captured(calls[0] == 'c');
      rank.is_due = rank.stops && rank.stops->is_due(rank.marks.begins_group());
      if (rank.is_due) return;
      answer(&rank);
    }
  }
  void answer(Rank* rank) {
    const bool is_simulated = processes_[rank->process].calls[0] == 's';
    if (!is_simulated) rank->used.push_back(rank->stops ? rank->stops->table() : nullptr);
    if (!rank->stops) return;
    rank->stops->answered(4, 1024, rank->marks.pass());
    if (!is_simulated) rank->marks.set_launched(nullptr);
  }

  void rank_goes_on(std::size_t i, Rank* rank) {
    if (!rank->ballot) {
      if (!rank->is_due || never_comes(*rank)) return;
      may("begin", i, [&] {
        const bool is_init = is_in_init(*rank);
        if (!is_init) rank->stops->write_vote(&rank->vote);
        if (!is_init) rank->vote.nonce += 100;
        const auto patience_ms = is_init ? limits_.vote_ms / 2 : rank->stops->patience_ms(limits_);
        rank->ballot.emplace(rank->vote, limits_, patience_ms, now_ms_);
      });
      if (is_in_init(*rank)) return;
      return may_once('o', "leave out", i, 0, [&] { end_round(rank, Verdict::kAbstain, {}); });
    }
    Ballot& ballot = *rank->ballot;
    Wire* wire = find(rank->connection);
    const Ballot::Step step = ballot.step;
    const bool is_time = ballot.until_ms <= now_ms_;
    if (step == Ballot::Step::kConnect && ballot.at_ms <= now_ms_) {
      may("connect", i, [&] {
        if (!is_listening()) return fail(rank);
        rank->connection = ++connections_;
        wires_.push_back({rank->connection, i});
        ballot.worked(now_ms_);
      });
    }
    if (step == Ballot::Step::kSend) {
      may("send", i, [&] {
        if (!wire->cut && wire->worker_open) wire->up.push_back(ballot.vote);
        ballot.worked(now_ms_);
      });
    }
    if (step == Ballot::Step::kListen && !wire->down.empty()) {
      may("hear", i, [&] {
        ballot.hear(wire->down.front(), now_ms_);
        wire->down.erase(wire->down.begin());
        after(rank);
      });
    } else if (step != Ballot::Step::kConnect && wire->end_for_rank) {
      may("hear end", i, [&] { fail(rank); });
    }
    if (is_time) {
      may("clock", i, [&] {
        ballot.look_at_clock(now_ms_);
        after(rank);
      });
    }
  }
  void fail(Rank* rank) {
    rank->ballot->failed(now_ms_);
    after(rank);
  }
  /// What a rank does once its ballot has changed.
  void after(Rank* rank) {
    const Ballot::Step step = rank->ballot->step;
    if (step == Ballot::Step::kConnect || step == Ballot::Step::kDone) hang_up(rank);
    if (step != Ballot::Step::kDone) return;
    end_round(rank, rank->ballot->verdict, rank->ballot->proposal);
  }
  void end_round(Rank* rank, Verdict verdict, const Reply& agreed) {
    const bool is_init = is_in_init(*rank);
    const auto* table = reinterpret_cast<const DecisionTable*>(agreed.question);  // stands for it
    rank->verdicts.push_back(verdict);
    rank->has_left |= verdict == Verdict::kFailed;
    if (is_init && verdict == Verdict::kTable) {
      rank->stops.emplace(rank->vote.round.comm, table, agreed);
      if (setup_->ranks_per_process > 1) rank->stops->end_voting();  // a second context of one id
    }
    if (!is_init) {
      if (verdict == Verdict::kTable) rank->stops->agreed(agreed, table);
      if (verdict == Verdict::kAbstain) rank->stops->failed();
      if (!rank->has_left) answer(rank);
      processes_[rank->process].calls.erase(0, 1);
    }
    rank->ballot.reset();
    rank->is_due = false;
    run(rank->process);
  }
  void hang_up(Rank* rank) {
    if (Wire* wire = find(rank->connection)) {
      wire->down.clear();
      wire->end_for_worker |= !wire->cut;
    }
    rank->connection = 0;
  }
  void disturb(std::size_t i, Rank* rank) {
    if (!rank->ballot) return;
    Process& process = processes_[rank->process];
    if (!is_in_init(*rank) && !process.stopped) {
      may_once('a', "abort", i, 0, [&] {
        rank->has_left = rank->is_aborted = true;
        rank->ballot->leave();
        after(rank);
      });
    }
    if (!process.stopped) may_once('s', "stop", i, 0, [&] { process.stopped = true; });
    may_once('r', "kill", i, 0, [&] {
      process = {true, false, process.calls};
      for (Rank& other : ranks_) {
        if (other.process != rank->process) continue;
        hang_up(&other);
        other.ballot.reset();
      }
      if (!setup_->is('i') || rank->process + 1 < processes_.size()) return;
      keeper_lives_ = false;
      kill_worker();
      arbiter_was_lost_ = false;  // of the job one process was lost, which was no member
    });
  }

  std::uint64_t deadline_of_worker() {
    // At time 0 no round is over: it only tells when the next one is.
    return worker_ && !worker_stopped_ ? worker_->look_at_clock(0, this) : kNoTime;
  }
  /// The next time at which anybody does something by itself.
  std::uint64_t deadline() {
    std::uint64_t next = deadline_of_worker();
    for (const Rank& rank : ranks_) {
      if (!rank.ballot || !processes_[rank.process].runs()) continue;
      const std::uint64_t at_ms = rank.ballot->at_ms;
      next = std::min({next, rank.ballot->until_ms, at_ms > now_ms_ ? at_ms : kNoTime});
    }
    return next;
  }
  /// As long as an answer may take; whoever has confirmed asks in vain all the time.
  void wait_long(bool is_answered) {
    was_long_ = true;
    now_ms_ += limits_.answer_ms;
    const std::uint64_t asks = is_answered ? limits_.answer_ms / limits_.ask_ms : kNoTime;
    for (Rank& rank : ranks_) {
      if (!rank.ballot || processes_[rank.process].stopped) continue;
      std::uint64_t& left = rank.ballot->asks_left;
      if (rank.ballot->has_confirmed()) left -= std::min(left, asks);
    }
  }

  bool log(const Logged& table) override {
    if (!has('f')) log_[table.round.comm] = table;
    return !has('f');
  }
  void send(Connection to, const Reply& reply) override {
    Wire* wire = find(to);
    const bool arrives = wire != nullptr && !wire->cut && is_held(*wire) && wire->worker_open;
    if (!arrives || sends_left_ == 0) return;
    --sends_left_;
    wire->down.push_back(reply);
  }
  std::uint64_t draw() override { return ++draws_; }
  void decided(const RoundKey&, bool) override {}
  const char* propose(const Vote& first, Reply* question) override {
    const bool is_first = first.round.number == 0;
    question->change = Change::kNewTable;
    question->next_stop = is_first ? setup_->first_stop : first.fields[1] + setup_->gap_calls;
    question->span_calls = setup_->span_calls;
    return nullptr;
  }

  bool is_listening() const { return worker_ || keeper_lives_; }
  bool is_held(const Wire& wire) const { return ranks_[wire.rank].connection == wire.id; }
  bool can_take(const Wire& wire) const {
    const bool has_news = wire.worker_open && (!wire.up.empty() || wire.end_for_worker);
    return worker_ && !worker_stopped_ && has_news;
  }
  std::size_t place(Connection id) const {
    std::size_t at = 0;
    while (at < wires_.size() && wires_[at].id != id) ++at;
    return at;
  }
  Wire* find(Connection id) { return place(id) < wires_.size() ? &wires_[place(id)] : nullptr; }
  void arbiter_goes_on() {
    for (std::size_t i = 0; i < wires_.size(); ++i) {
      if (can_take(wires_[i])) may("take", i, [&] { take(&wires_[i]); });
    }
    if (deadline_of_worker() <= now_ms_) {
      may("worker clock", 0, [&] {
        has_idled_ = false;
        worker_->look_at_clock(now_ms_, this);
      });
    }
    if (!worker_ && keeper_lives_) {
      may("restart", 0, [&] {
        worker_.emplace(kJob, limits_);
        for (const auto& [comm, table] : log_) worker_->restore(table);
      });
    }
  }
  void take(Wire* wire) {
    wire->accepted = true;
    has_idled_ = false;
    if (wire->up.empty()) {
      wire->worker_open = false;
      return worker_->gone(wire->id, this);
    }
    const Vote vote = wire->up.front();
    wire->up.erase(wire->up.begin());
    worker_->hear(wire->id, vote, now_ms_, this);
  }
  void kill_worker() {
    worker_.reset();
    worker_stopped_ = false;
    for (Wire& wire : wires_) {
      if (!wire.accepted && keeper_lives_) continue;  // it waits for the next worker
      wire.worker_open = false;
      wire.up.clear();
      wire.end_for_rank |= !wire.cut;
    }
    arbiter_was_lost_ |= !keeper_lives_;
  }
  void disturb_arbiter() {
    if (worker_ && !is_stranger_) {
      may_once('w', "kill worker", 0, 0, [&] { kill_worker(); });
      if (!worker_stopped_) may_once('s', "stop worker", 0, 0, [&] { worker_stopped_ = true; });
    }
    for (std::size_t i = 0; i < wires_.size(); ++i) {
      Wire& wire = wires_[i];
      for (std::size_t how = 0; how <= wires_.size() && can_take(wire) && !is_stranger_; ++how) {
        may_once('w', "kill worker in its replies", i, how, [&] {
          sends_left_ = static_cast<int>(how);
          take(&wire);
          sends_left_ = -1;
          kill_worker();
        });
      }
      // Bits: lose what goes up, what comes down; the rank learns of it, the worker does.
      for (std::size_t how = 0; how < 16 && !wire.cut; ++how) {
        may_once('c', "cut", i, how, [&] {
          wire.cut = true;
          if ((how & 1) != 0) wire.up.clear();
          if ((how & 2) != 0) wire.down.clear();
          wire.end_for_rank |= (how & 4) != 0;
          wire.end_for_worker |= (how & 8) != 0;
        });
      }
    }
    if (keeper_lives_) {
      may_once('k', "kill keeper", 0, 0, [&] {
        keeper_lives_ = false;
        if (!worker_) kill_worker();  // and what waited for the next one
      });
    }
    if (!is_listening()) {
      may_once('x', "stranger", 0, 0, [&] {
        is_stranger_ = true;
        worker_.emplace(kOtherJob, limits_);
      });
    }
  }

  const Setup* setup_;
  Limits limits_;
  std::uint64_t now_ms_ = 1'000;
  std::vector<Rank> ranks_;
  std::vector<Process> processes_;
  std::optional<Rounds> worker_;
  bool worker_stopped_ = false;
  bool is_stranger_ = false;
  bool keeper_lives_ = true;
  std::map<std::uint64_t, Logged> log_;  // by communicator
  std::vector<Wire> wires_;
  int sends_left_ = -1;  // before the worker is killed; -1: all
  Connection connections_ = 0;
  std::uint64_t draws_ = 100;
  bool has_idled_ = false;  // the clock went on since the worker last did something
  bool was_long_ = false;
  bool arbiter_was_lost_ = false;
};

}  // namespace dynamiccl
