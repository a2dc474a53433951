// One rank's communicator of one slot, from its creation to its end, with all that it runs.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/job/board.h"
#include "tests/job/fake_nccl.h"
#include "tests/job/plan.h"

/// What all streams of a rank share.
struct RankContext {
  const Options& options;
  const Plan& plan;
  Board& board;
  Process& process;
  int rank;
  std::function<void(int slot, std::uint64_t call, const std::string& what)> report_error;
};

class Stream {
 public:
  Stream(RankContext& context, int slot);
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  /// Creates the communicator, together with the other ranks.
  void create();

  /// Runs one group; false when the stream is over.
  bool step();

  /// The job's watchdog: aborts the communicator when another rank has been lost for a while. From
  /// any thread.
  void watch();

 private:
  struct Window {  // of groups that somebody plays from a graph
    std::uint64_t first = 0, length = 0, end = 0;
    bool is_mine = false;
    std::vector<Graph> graphs;
  };

  void act();
  void perform(const Action& action, std::size_t index);
  void ask_launcher(std::size_t index);
  void run_group();
  void push(const std::vector<Outcome>& outcomes, bool replayed);
  void destroy();
  void finish(bool lost);
  void pace();
  bool somebody_is_lost() const;
  bool all_others(const std::function<bool(const Lane&)>& condition) const;
  void wait(const std::function<bool()>& condition);
  void start_abort(double delay_s);

  RankContext& context_;
  const int slot_;
  const std::vector<int> members_;
  Lane& lane_;
  std::mt19937_64 random_;
  std::unique_ptr<Communicator> communicator_;
  std::uint32_t generation_ = 0;
  std::uint64_t calls_ = 0;       // through all generations
  std::uint64_t first_call_ = 0;  // of this generation
  std::uint64_t group_ = 0;
  std::uint64_t begin_ns_;
  std::vector<std::uint64_t> due_;  // the call at which each action happens next
  Window window_;
  std::atomic<bool> exists_{false};  // the communicator may be aborted
  std::atomic<bool> aborted_{false};
  std::atomic<bool> over_{false};
  std::atomic<std::uint64_t> lost_since_ns_{0};
  std::mutex abort_mutex_;
  std::vector<std::thread> aborters_;
};

/// What the launcher tells a rank beside the command line.
struct RankStart {
  int rank;
  std::uint64_t job_id;
  Board* board;
  int log_descriptor;  // lines of one letter (L log, V violation, E error), a tab and text
};

/// Plays the rank's part to its end; returns the exit code.
int run_rank(const Options& options, const RankStart& start);
