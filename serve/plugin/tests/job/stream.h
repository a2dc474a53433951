// A rank's communicators, each from its creation to its end, with all that it runs. Waiting is for
// the other ranks only, as for a GPU's queue: nothing here waits for a plugin.
#pragma once

#include <fcntl.h>
#include <linux/fs.h>
#include <signal.h>

#include <limits>
#include <memory>

#include "tests/job/fake_nccl.h"

inline void sleep_s(double seconds) {
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

inline bool g_is_forked_child = false;

/// Asked by the leak detector: a child has the memory of threads that are not there.
extern "C" __attribute__((visibility("default"))) int __lsan_is_turned_off() {
  return static_cast<int>(g_is_forked_child);
}

class Stream {
 public:
  Stream(Process& process, const Board& board, int rank, int slot)
      : options_(process.options),
        board_(board),
        process_(process),
        rank_(rank),
        slot_(slot),
        members_(plan_.members(slot, rank)),
        lane_(board.lane(slot, rank)) {
    for (const int member : members_) lane_.members |= 1 << member;
    for (const Action& action : options_.actions) {
      due_.push_back(action.slot == slot ? action.call : kNever);
    }
  }

  /// Creates the communicator, together with the other ranks.
  void create() {
    guard([&] {
      const int stage = 2 * generation_ + 1;
      if (options_["shrinks"] != 0 && slot_ > 0 && generation_ == 0) {
        // A parent is ready before anything is made of it (2.30.7 `init.cc:3095`).
        const Lane& parent = board_.lane(slot_ > 1 ? 1 : 0, rank_);
        wait([&] { return parent.stage >= 2 || parent.end != Lane::playing; });
        if (parent.stage < 2) throw Aborted();
      }
      lane_.stage = stage;
      wait_for_others([&](const Lane& lane) { return lane.stage >= stage; });
      const auto position = std::find(members_.begin(), members_.end(), rank_);
      communicator_ = std::make_unique<Communicator>(
          process_, plan_.comm_id(slot_, rank_, generation_),
          static_cast<int>(position - members_.begin()), static_cast<int>(members_.size()),
          plan_.num_nodes(members_));
      if (rank_ == options_["abort-creation"] && slot_ == 0 && generation_ == 0) {
        communicator_->abort();  // which waits for the creation (2.30.7 `init.cc:3041`)
        throw Aborted();
      }
      first_call_ = calls_;
      exists_ = true;
      if (aborted_ && exists_.exchange(false)) communicator_->abort();  // it came meanwhile
      lane_.stage = stage + 1;
      wait_for_others([&](const Lane& lane) { return lane.stage > stage; });
    });
  }

  /// Runs one group; false when the stream is over.
  bool step() {
    if (lane_.end != Lane::playing) return false;
    guard([&] {
      if (calls_ >= options_["calls"]) {
        destroy();
        lane_.end = Lane::done;
      } else if (options_["lifetime"] > 0 && calls_ - first_call_ >= options_["lifetime"]) {
        destroy();
        ++generation_;
        create();
      } else {
        act();
        run_group();
      }
    });
    return lane_.end == Lane::playing;
  }

  /// The job's watchdog: aborts the communicator when another rank has been lost for a while. On a
  /// thread of its own.
  void watch() {
    const auto is_lost = [&](int rank) { return rank != rank_ && end_of(rank) == Lane::lost; };
    if (lane_.end != Lane::playing || aborted_ || options_["survivors-go-on"] != 0) return;
    if (std::none_of(members_.begin(), members_.end(), is_lost)) return;
    if (lost_since_ns_ == 0) lost_since_ns_ = now_ns();
    if (static_cast<double>(now_ns() - lost_since_ns_) < 1e9 * options_.numbers.at("watchdog"))
      return;
    lost_since_ns_ = now_ns();
    start_abort(0);
  }

  /// After the last call of the others.
  void join() {
    for (std::thread& aborter : aborters_) aborter.join();
  }

 private:
  static constexpr int kNever = std::numeric_limits<int>::max();

  template <typename Body>
  void guard(const Body& body) {
    try {
      body();
    } catch (const Aborted&) {
      lane_.end = Lane::lost;
    } catch (const std::exception& error) {
      tell('E', "comm " + std::to_string(slot_) + " call " + std::to_string(calls_) + ": " +
                    error.what());
      start_abort(0);  // as a job does whose collective failed
      lane_.end = Lane::lost;
    }
  }

  int end_of(int rank) const {
    const bool is_dead = board_.rank(rank).dead;  // before looking at its lane
    const int end = board_.lane(slot_, rank).end;
    return end == Lane::playing && is_dead ? Lane::lost : end;
  }

  template <typename Condition>
  void wait(const Condition& condition) const {
    while (!condition()) {
      if (aborted_) throw Aborted();
      sleep_s(50e-6);
    }
  }

  /// Until `condition` holds for every other rank that can still come to fulfil it. For a lost one
  /// others wait in vain, until they abort.
  template <typename Condition>
  void wait_for_others(const Condition& condition) const {
    wait([&] {
      return std::all_of(members_.begin(), members_.end(), [&](int rank) {
        const int end = end_of(rank);
        if (end == Lane::lost) return options_["survivors-go-on"] != 0;
        return rank == rank_ || end == Lane::done || condition(board_.lane(slot_, rank));
      });
    });
  }

  void run_group() {
    wait_for_others([&](const Lane& lane) { return calls_ < lane.issued + options_["run-ahead"]; });
    pace();
    if (group_ >= window_.end) window_ = {};
    int index = group_;
    if (window_.length > 0) index = window_.first + (group_ - window_.first) % window_.length;
    if (window_.graphs.empty()) {
      push(communicator_->run(plan_.group(slot_, index)));
    } else {
      const auto which = static_cast<std::size_t>(index - window_.first);
      push(communicator_->replay(window_.graphs[which]));
    }
    ++group_;
  }

  void push(const std::vector<Outcome>& outcomes) {
    for (const Outcome& outcome : outcomes) {
      board_.record(slot_, rank_, static_cast<std::size_t>(calls_)) = {outcome, generation_,
                                                                       calls_ - first_call_};
      lane_.issued = ++calls_;
    }
  }

  void pace() {
    if (options_["rate"] > 0) {
      const double late_s = 1e-9 * static_cast<double>(now_ns() - begin_ns_) -
                            static_cast<double>(calls_) / options_["rate"];
      if (late_s < 0) sleep_s(-late_s);
      // No job makes good a pause of its machine by calling faster.
      if (late_s > 0.005) begin_ns_ += static_cast<std::uint64_t>(1e9 * late_s);
    }
    const std::uint64_t draw = mixed(mixed(options_["seed"], 100 * rank_ + slot_), group_);
    if (options_["jitter-us"] > 0 && draw % 8 == 0) {
      sleep_s(1e-6 * static_cast<double>(draw / 8 % (8U * options_["jitter-us"])));
    }
  }

  void act() {
    for (std::size_t i = 0; i < due_.size(); ++i) {
      if (calls_ < due_[i]) continue;
      const Action& action = options_.actions[i];
      due_[i] = action.repeats ? (calls_ / action.call + 1) * action.call : kNever;
      const bool is_mine = action.rank < 0 || action.rank == rank_;
      if (action.kind == "capture") {
        capture(action.count(), std::atoi(action.second().c_str()), is_mine);
      } else if (is_mine) {
        perform(action);
      }
    }
  }

  /// The groups that come next, played so many times; by the others as well, but not from graphs.
  void capture(int length, int times, bool is_mine) {
    window_ = {group_, length, group_ + length * times, {}};
    for (int i = 0; is_mine && i < length; ++i) {
      window_.graphs.push_back(communicator_->capture(plan_.group(slot_, group_ + i)));
    }
  }

  void perform(const Action& action) {
    const bool is_of_broadcasts = action.kind == "bcasts";
    std::vector<Task> tasks;  // of those that need some
    for (int i = 0; i < action.count(); ++i) {
      tasks.push_back(is_of_broadcasts ? Task{kBroadcast, std::size_t{4096} << i, false}
                                       : plan_.group(slot_, group_ + 3 * i).front());
    }
    if (action.kind == "simulate") {
      communicator_->simulate(tasks);
    } else if (action.kind == "symmetric") {
      communicator_->ask_about_symmetric(tasks);
    } else if (action.kind == "p2p") {
      communicator_->send_receive();
    } else if (is_of_broadcasts) {
      push(communicator_->broadcast_many(tasks));
    } else if (action.kind == "sleep") {
      sleep_s(action.seconds());
    } else if (action.kind == "kill") {
      g_state->kills_itself = true;
      kill(getpid(), SIGKILL);
    } else if (action.kind == "fork") {
      if (fork() == 0) {
        g_is_forked_child = true;
        sleep_s(0.02);
        std::exit(0);
      }
    } else if (action.kind == "abort") {
      start_abort(action.seconds());
    } else if (action.kind == "sh") {
      if (std::system(action.argument.c_str()) != 0) {
        std::fprintf(stderr, "play_job: failed: %s\n", action.argument.c_str());
      }
    } else if (action.kind == "swap") {
      const std::string one = action.argument.substr(0, action.argument.find(','));
      const std::string other = action.second();
      if (renameat2(AT_FDCWD, one.c_str(), AT_FDCWD, other.c_str(), RENAME_EXCHANGE) != 0) {
        std::perror("play_job: swap");
      }
    }
  }

  void destroy() {
    if (options_["destroy"] == 0 && calls_ >= options_["calls"]) return;
    wait_for_others([&](const Lane& lane) { return lane.issued >= calls_; });
    {
      const std::lock_guard<std::mutex> lock(abort_mutex_);
      if (aborted_) throw Aborted();
      exists_ = false;  // from here on nobody may abort it
    }
    communicator_->destroy();
  }

  void start_abort(double delay_s) {
    const std::lock_guard<std::mutex> lock(abort_mutex_);
    aborters_.push_back(start_thread([this, delay_s] {
      sleep_s(delay_s);
      {
        const std::lock_guard<std::mutex> own(abort_mutex_);
        if (aborted_.exchange(true) || !exists_.exchange(false)) return;
      }
      communicator_->abort();
    }));
  }

  struct Window {  // of groups that somebody plays from graphs
    int first = 0, length = 0, end = 0;
    std::vector<Group> graphs;
  };

  const Options& options_;
  const Plan plan_{options_};
  const Board& board_;
  Process& process_;
  const int rank_, slot_;
  const std::vector<int> members_;
  Lane& lane_;
  std::unique_ptr<Communicator> communicator_;
  int generation_ = 0;
  int calls_ = 0;       // through all generations
  int first_call_ = 0;  // of this generation
  int group_ = 0;
  std::uint64_t begin_ns_ = now_ns();
  std::vector<int> due_;  // the call at which each action happens next
  Window window_;
  std::atomic<bool> exists_{false};  // the communicator may be aborted
  std::atomic<bool> aborted_{false};
  std::uint64_t lost_since_ns_ = 0;
  std::mutex abort_mutex_;
  std::vector<std::thread> aborters_;
};
