// Plays a whole job against a tuner and profiler plugin, as NCCL would, without NCCL and GPUs.
//
//   play_job PLUGIN.so [--NAME VALUE]...      options.h has the names; prints one JSON document
//
// Each rank is a process of its own. At every collective it is checked that all ranks would run the
// same algorithm, protocol and channels: where they would not, a real job hangs. The
// launcher has one thread and never waits without an end: whatever the ranks do, the deadline
// comes.

#include <fcntl.h>
#include <linux/fs.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <thread>

#include "tests/job/board.h"
#include "tests/job/checker.h"
#include "tests/job/fake_nccl.h"
#include "tests/job/plan.h"
#include "tests/job/proxy.h"
#include "tests/job/stream.h"

namespace {

constexpr const char* kStartVariable = "PLAY_JOB_RANK";  // rank:job:board:log

Board* map_board(int num_slots, int descriptor) {
  void* memory = mmap(nullptr, Board::size_bytes(num_slots), PROT_READ | PROT_WRITE, MAP_SHARED,
                      descriptor, 0);
  if (memory == MAP_FAILED) throw std::runtime_error("the board cannot be mapped");
  return static_cast<Board*>(memory);
}

/// A new board in memory that children inherit as `*descriptor`.
Board* create_board(int num_slots, int* descriptor) {
  static_assert(sizeof(Board) % alignof(Lane) == 0, "lanes follow the board");
  *descriptor = memfd_create("board", 0);
  const auto size_bytes = static_cast<off_t>(Board::size_bytes(num_slots));
  if (*descriptor < 0 || ftruncate(*descriptor, size_bytes) != 0) {
    throw std::runtime_error("no memory for the board");
  }
  return map_board(num_slots, *descriptor);
}

std::string read_all(int descriptor) {
  std::string text;
  char block[4096];
  off_t at = 0;
  for (ssize_t count = 0; (count = pread(descriptor, block, sizeof block, at)) > 0; at += count) {
    text.append(block, static_cast<std::size_t>(count));
  }
  return text;
}

class Job {
 public:
  Job(const Options& options, const std::vector<std::string>& command)
      : options_(options),
        job_id_(now_ns() ^ static_cast<std::uint64_t>(getpid()) << 48),
        plan_(options, job_id_),
        board_(create_board(options.num_slots, &board_descriptor_)),
        checker_(options, plan_, *board_),
        begin_ns_(now_ns()) {
    end_.ranks.resize(static_cast<std::size_t>(options.num_ranks));
    for (int rank = 0; rank < options.num_ranks; ++rank) {
      // A close-on-exec flag would keep it from the rank. Appending keeps lines whole.
      logs_.push_back(memfd_create("log", 0));
      fcntl(logs_.back(), F_SETFL, O_APPEND);
      processes_.push_back(start(rank, command));
    }
    board_->go = true;
  }

  std::string play() {
    while (any_alive()) {
      const bool any = checker_.advance();
      reap();
      serve();
      if (!end_.hit_deadline && seconds() > options_.deadline_s) end_by_force();
      if (!any) std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    while (checker_.advance()) {
    }
    end_.wall_s = seconds();
    for (const int log : logs_) end_.logs.push_back(read_all(log));
    return to_json(options_, checker_, *board_, end_);
  }

 private:
  double seconds() const { return 1e-9 * static_cast<double>(now_ns() - begin_ns_); }

  bool any_alive() const {
    return std::any_of(processes_.begin(), processes_.end(), [](pid_t pid) { return pid != 0; });
  }

  pid_t start(int rank, const std::vector<std::string>& command) {
    const pid_t child = fork();
    if (child < 0) throw std::runtime_error("a rank cannot be started");
    if (child > 0) return child;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    enter_namespace(rank);
    set_environment(rank);
    std::vector<char*> arguments;
    for (const std::string& word : command) arguments.push_back(const_cast<char*>(word.c_str()));
    arguments.push_back(nullptr);
    execv("/proc/self/exe", arguments.data());
    _exit(127);
  }

  /// In a child, before the program: without it the rank would be on the wrong side of a cut.
  void enter_namespace(int rank) const {
    const auto found = options_.namespaces.find(rank);
    if (found == options_.namespaces.end()) return;
    const int descriptor = open(found->second.c_str(), O_RDONLY | O_CLOEXEC);
    if (descriptor < 0 || setns(descriptor, CLONE_NEWNET) != 0) _exit(126);
  }

  void set_environment(int rank) const {
    const int per_node = options_.num_ranks / options_.num_nodes;
    const auto set = [](const char* name, const std::string& value) {
      setenv(name, value.c_str(), 1);
    };
    set("RANK", std::to_string(rank));
    set("WORLD_SIZE", std::to_string(options_.num_ranks));
    set("LOCAL_RANK", std::to_string(rank % per_node));
    set("LOCAL_WORLD_SIZE", std::to_string(per_node));
    set("GROUP_RANK", std::to_string(rank / per_node));
    set("NCCL_TUNER_PLUGIN", options_.plugin);
    set("NCCL_PROFILER_PLUGIN", options_.plugin);
    for (const auto& [whose, assignment] : options_.environment) {
      if (whose >= 0 && whose != rank) continue;
      const std::size_t equals = assignment.find('=');
      const std::string name = assignment.substr(0, equals);
      if (equals == std::string::npos) {
        unsetenv(name.c_str());
      } else {
        set(name.c_str(), assignment.substr(equals + 1));
      }
    }
    set(kStartVariable, std::to_string(rank) + ":" + std::to_string(job_id_) + ":" +
                            std::to_string(board_descriptor_) + ":" +
                            std::to_string(logs_[static_cast<std::size_t>(rank)]));
  }

  void reap() {
    for (std::size_t rank = 0; rank < processes_.size(); ++rank) {
      int status = 0;
      if (processes_[rank] == 0 || waitpid(processes_[rank], &status, WNOHANG) <= 0) continue;
      processes_[rank] = 0;
      RankEnd& end = end_.ranks[rank];
      end.exited = WIFEXITED(status);
      if (end.exited) end.exit_code = WEXITSTATUS(status);
      if (WIFSIGNALED(status)) end.signal = WTERMSIG(status);
      end.expected = end.exited ? end.exit_code == 0 : end.signal == SIGKILL && may_die(rank);
      board_->ranks[rank].dead = true;
    }
  }

  bool may_die(std::size_t rank) const {
    return !end_.hit_deadline &&
           std::any_of(options_.actions.begin(), options_.actions.end(), [&](const Action& action) {
             const bool is_ours = action.rank < 0 || action.rank == static_cast<int>(rank);
             return action.kind == Action::Kind::kill && is_ours;
           });
  }

  /// Does what ranks asked for, and wakes those that have slept long enough.
  void serve() {
    for (std::size_t rank = 0; rank < processes_.size(); ++rank) {
      std::atomic<std::uint32_t>& request = board_->ranks[rank].request;
      const std::uint32_t number = request;
      if (number == 0) continue;
      perform(options_.actions[number - 1], rank);
      request = 0;
    }
    for (auto sleeper = sleepers_.begin(); sleeper != sleepers_.end();) {
      if (seconds() < sleeper->first) {
        ++sleeper;
        continue;
      }
      if (processes_[sleeper->second] != 0) kill(processes_[sleeper->second], SIGCONT);
      sleeper = sleepers_.erase(sleeper);
    }
  }

  void perform(const Action& action, std::size_t rank) {
    if (action.kind == Action::Kind::stop) {
      if (processes_[rank] == 0) return;
      kill(processes_[rank], SIGSTOP);
      sleepers_.emplace_back(seconds() + std::atof(action.arguments[0].c_str()), rank);
    } else if (action.kind == Action::Kind::shell) {
      if (std::system(action.arguments[0].c_str()) != 0) {
        std::fprintf(stderr, "play_job: failed: %s\n", action.arguments[0].c_str());
      }
    } else if (action.kind == Action::Kind::swap) {
      const int result = renameat2(AT_FDCWD, action.arguments[0].c_str(), AT_FDCWD,
                                   action.arguments[1].c_str(), RENAME_EXCHANGE);
      if (result != 0) {
        std::fprintf(stderr, "play_job: swap: %s\n", std::strerror(errno));
      }
    }
  }

  void end_by_force() {
    end_.hit_deadline = true;
    for (const pid_t process : processes_) {
      if (process != 0) kill(process, SIGKILL);
    }
  }

  const Options& options_;
  const std::uint64_t job_id_;
  const Plan plan_;
  int board_descriptor_ = -1;
  Board* board_;
  Checker checker_;
  const std::uint64_t begin_ns_;
  std::vector<int> logs_;
  std::vector<pid_t> processes_;                          // 0: has ended
  std::vector<std::pair<double, std::size_t>> sleepers_;  // when to wake which rank
  JobEnd end_;
};

/// If this process was started as a rank of a job, plays its part and returns true.
bool is_rank(const Options& options, int* exit_code) {
  const char* start = std::getenv(kStartVariable);
  if (start == nullptr) return false;
  RankStart told = {};
  unsigned long long job_id = 0;
  int board = -1;
  if (std::sscanf(start, "%d:%llu:%d:%d", &told.rank, &job_id, &board, &told.log_descriptor) != 4) {
    throw std::invalid_argument(std::string(kStartVariable) + " is for this program's own use");
  }
  unsetenv(kStartVariable);
  told.job_id = job_id;
  told.board = map_board(options.num_slots, board);
  *exit_code = run_rank(options, told);
  return true;
}

class Complaints final : public Witness {
 public:
  void log(int, const std::string& line) override { std::fprintf(stderr, "%s\n", line.c_str()); }
  void violation(const std::string& what) override {
    log(0, what);
    ++violations;
  }
  void asked(std::uint64_t) override {}
  void created(std::uint64_t) override {}

  std::atomic<int> violations{0};
};

/// All ranks in this process, whose one thread calls them in turn, as with ncclCommInitAll. A call
/// that waited for another rank's would wait in vain.
std::string play_on_one_thread(const Options& options) {
  adopt_thread();
  Complaints complaints;
  set_witness(&complaints);
  ProcessOptions chosen;
  chosen.tuner_path = chosen.profiler_path = options.plugin;
  Process process(release_named(options.release), chosen, complaints);
  std::vector<std::unique_ptr<Communicator>> ranks(static_cast<std::size_t>(options.num_ranks));
  std::vector<std::thread> threads;  // NCCL's, one for each `init` of a group
  for (int rank = 0; rank < options.num_ranks; ++rank) {
    threads.emplace_back([&, rank] {
      adopt_thread();
      ranks[static_cast<std::size_t>(rank)] = std::make_unique<Communicator>(
          process, CommunicatorOptions{0x1234567890abcdef, rank, options.num_ranks, 1});
    });
  }
  for (std::thread& thread : threads) thread.join();
  int acted = 0, differ = 0;
  for (std::uint64_t call = 0; call < options.num_calls; ++call) {
    Outcome first = {};
    for (const auto& rank : ranks) {
      const Outcome outcome = rank->run({{dynamiccl::kAllReduce, 1 << 20, Datatype::f32}}).front();
      if (rank == ranks.front()) first = outcome;
      acted += outcome.acted;
      differ += outcome.algorithm != first.algorithm || outcome.protocol != first.protocol ||
                outcome.num_channels != first.num_channels;
    }
  }
  for (const auto& rank : ranks) rank->destroy();
  return "{\"acted\": " + std::to_string(acted) + ", \"differ\": " + std::to_string(differ) +
         ", \"violations\": " + std::to_string(complaints.violations) + "}\n";
}

}  // namespace

int main(int count, char** arguments) {
  const std::vector<std::string> command(arguments, arguments + count);
  try {
    const Options options = parse({command.begin() + 1, command.end()});
    int exit_code = 0;
    if (is_rank(options, &exit_code)) return exit_code;
    release_named(options.release);  // before anything is started
    const std::string told =
        options.is_on_one_thread ? play_on_one_thread(options) : Job(options, command).play();
    std::fputs(told.c_str(), stdout);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "play_job: %s\n", error.what());
    return 2;
  }
  return 0;
}
