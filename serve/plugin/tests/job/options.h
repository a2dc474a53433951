// A job, and what its ranks do at chosen calls: the command line of play.py and `play_rank`.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

/// What a rank can do before a call of one of its communicators.
inline const std::set<std::string> kActions = {
    "simulate",   // =TASKS: a simulated group
    "symmetric",  // =TASKS: questions about symmetric kernels, as NCCL 2.31 asks them
    "capture",  // =GROUPS,TIMES: captured as CUDA graphs and replayed, by whoever does not ask live
    "p2p",      // ncclSend and ncclRecv in a group of their own
    "bcasts",   // =ROOTS: broadcasts in one group; only for all ranks
    "sleep",    // =SECONDS
    "kill",     // SIGKILL
    "fork",     // a child that lives on for a moment and exits
    "abort",    // =SECONDS: ncclCommAbort from another thread, so long after the call began
    "sh",       // =COMMAND, whose end the call waits for
    "swap",     // =PATH,PATH: one rename that exchanges them
};

struct Action {
  int call;
  bool repeats;  // also at every multiple of `call`
  int rank;      // -1: all ranks
  int slot;      // which communicator of the rank
  std::string kind, argument;

  int count() const { return std::atoi(argument.c_str()); }
  double seconds() const { return std::atof(argument.c_str()); }
  /// What follows the comma.
  std::string second() const { return argument.substr(argument.find(',') + 1); }
};

/// NCCL's codes. 2.31 stands for a release that was not read.
inline const std::map<std::string, int> kReleases = {
    {"2.24", 22403}, {"2.25", 22501}, {"2.26", 22606}, {"2.27", 22707},
    {"2.28", 22809}, {"2.29", 22907}, {"2.30", 23007}, {"2.31", 23102}};

struct Options {
  std::map<std::string, double> numbers = {
      {"board", -1},  // descriptor of board.h
      {"job", 0},     // sets two jobs of one seed apart, as NCCL's unique ids do
      {"rank", 0},
      {"ranks", 4},
      {"nodes", 1},
      {"comms", 1},       // communicators that each rank is in
      {"threads", 1},     // each with its own communicators
      {"calls", 1000},    // of each communicator
      {"lifetime", 0},    // calls after which a communicator is made anew; 0: never
      {"rate", 0},        // calls a second; 0: as fast as it goes
      {"run-ahead", 64},  // calls that a rank may be ahead of the slowest
      {"max-group", 4},   // collectives in one group
      {"pattern", 64},    // groups after which the job's questions repeat
      {"jitter-us", 50},  // random pauses of each rank
      {"seed", 1},
      {"watchdog", 1},         // seconds that a rank waits for a lost one before it aborts
      {"survivors-go-on", 0},  // they wait for no lost one
      {"opposite", 0},         // ranks 1, 3 ... call their communicators in the opposite order
      {"shrinks", 0},          // the communicators but the first come of shrinks: plan.h
      {"create-at-once", 0},   // each communicator on a thread of its own, as in one group
      {"abort-creation", -1},  // this rank aborts the first communicator while it is made
      {"one-thread", 0},       // all ranks are on one, as after ncclCommInitAll
      {"destroy", 1},          // 0: exits without ncclCommDestroy
      {"kernel-delay-us", 0},
      {"kernel-drop", 0},       // percent
      {"kernel-duplicate", 0},  // percent
      {"scatter", 0},           // percent; kernels take up to so much longer
  };
  int release = kReleases.at("2.28");
  int slow_cell = -1;  // algorithm x 3 + protocol whose kernels take `slow_factor` as long
  double slow_factor = 1;
  std::vector<Action> actions;

  int operator[](const char* name) const { return static_cast<int>(numbers.at(name)); }
};

/// Pairs of --NAME VALUE. Throws std::invalid_argument on what it does not know.
inline Options parse(const std::vector<std::string>& words) {
  Options options;
  for (std::size_t i = 0; i < words.size(); i += 2) {
    const std::string name = words[i], value = i + 1 < words.size() ? words[i + 1] : "";
    const auto check = [&](bool is_right, const std::string& wanted) {
      if (!is_right) throw std::invalid_argument(name + " " + value + ": " + wanted);
    };
    check(name.rfind("--", 0) == 0, "is no option");
    if (const auto found = options.numbers.find(name.substr(2)); found != options.numbers.end()) {
      char* end = nullptr;
      found->second = std::strtod(value.c_str(), &end);
      check(!value.empty() && *end == '\0', "needs a number");
    } else if (name == "--release") {
      check(kReleases.count(value) > 0, "needs 2.24 to 2.31");
      options.release = kReleases.at(value);
    } else if (name == "--slow") {
      int algorithm = 0, protocol = 0;
      double* factor = &options.slow_factor;
      check(std::sscanf(value.c_str(), "%d:%d:%lf", &algorithm, &protocol, factor) == 3,
            "needs ALGORITHM:PROTOCOL:FACTOR, in numbers");
      options.slow_cell = 3 * algorithm + protocol;
    } else {
      Action action = {0, name == "--every", 0, 0, "", ""};
      check(name == "--at" || name == "--every", "is no option");
      int at = 0;
      std::sscanf(value.c_str(), "%d:%d:%d:%n", &action.call, &action.rank, &action.slot, &at);
      const std::string what = value.substr(static_cast<std::size_t>(at));
      action.kind = what.substr(0, what.find('='));
      action.argument = what.substr(what.find('=') + 1);
      check(at > 0 && kActions.count(action.kind) > 0, "needs CALL:RANK:COMM:ACTION");
      check(action.call > 0 || !action.repeats, "needs a call that is not 0");
      options.actions.push_back(action);
    }
  }
  bool is_right = options["ranks"] >= 2 && options["ranks"] <= 16 && options["nodes"] > 0 &&
                  options["ranks"] % options["nodes"] == 0;
  for (const char* name : {"comms", "threads", "run-ahead", "max-group", "pattern"}) {
    is_right = is_right && options[name] > 0;
  }
  for (const Action& action : options.actions) {
    is_right = is_right && action.slot < options["comms"] && action.rank < options["ranks"];
  }
  if (is_right) return options;
  throw std::invalid_argument(
      "--ranks is 2 to 16 and a multiple of --nodes; --comms, --threads, --run-ahead, --max-group "
      "and --pattern are from 1; an action is on a rank and a communicator that are there");
}
