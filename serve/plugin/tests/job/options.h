// The command line of `play_job`: the job, its habits, and what happens to it at chosen calls.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

/// Something that happens on one rank, or on the launcher, before a chosen call of a communicator.
struct Action {
  enum class Kind : std::uint8_t {
    simulate,   // =TASKS: a simulated group
    symmetric,  // =TASKS: questions about symmetric kernels, as NCCL 2.31 asks them
    capture,  // =GROUPS,TIMES: captured as a CUDA graph and replayed, by whoever does not ask live
    p2p,      // ncclSend and ncclRecv in a group of their own
    bcasts,   // =ROOTS: broadcasts in one group; only for all ranks
    sleep,    // =SECONDS
    stop,     // =SECONDS: SIGSTOP, later SIGCONT
    kill,     // SIGKILL
    fork,     // a child that lives on for a moment and exits
    abort,    // =SECONDS: ncclCommAbort from another thread, so long after the call began
    shell,    // =COMMAND: on the launcher; the call waits for it
    swap,     // =PATH,PATH: on the launcher, one rename that exchanges them; the call waits for it
  };
  Kind kind;
  std::uint64_t call;
  bool repeats;  // also at every multiple of `call`
  int rank;      // -1: all ranks
  int slot;      // which communicator of the rank
  std::vector<std::string> arguments;
};

struct Options {
  std::string plugin;
  std::string release = "2.28";
  int num_ranks = 4;
  int num_nodes = 1;
  int num_slots = 1;    // communicators that each rank is in
  int num_threads = 1;  // each with its own communicators
  std::uint64_t num_calls = 1000;
  std::uint64_t calls_per_lifetime = 0;  // a communicator is then destroyed and made anew; 0: never
  double calls_per_s = 0;                // 0: as fast as it goes
  int run_ahead = 64;                    // calls that a rank may be ahead of the slowest
  int max_group = 4;                     // collectives in one group
  int pattern = 64;                      // groups after which the job's questions repeat
  int jitter_us = 50;                    // random pauses of each rank
  std::uint64_t seed = 1;
  double deadline_s = 60;
  double watchdog_s = 1;  // after which a rank that waits for a lost one aborts the communicator
  bool survivors_go_on = false;
  bool is_opposite = false;       // ranks 1, 3 ... call their communicators in the opposite order
  bool shrinks = false;           // the communicators but the first come of shrinks: plan.h
  bool creates_at_once = false;   // each communicator on a thread of its own, as in one group
  int aborts_creation = -1;       // this rank aborts the first communicator while it is made
  bool is_on_one_thread = false;  // all ranks are; nothing but their number and calls counts then
  bool destroys = true;           // false: exits without ncclCommDestroy
  int kernel_delay_us = 0, kernel_drop_percent = 0, kernel_duplicate_percent = 0;
  int slow_cell = -1;
  double slow_factor = 1.0;
  double scatter_percent = 0.0;
  std::map<int, std::string> namespaces;                 // path of the rank's network namespace
  std::vector<std::pair<int, std::string>> environment;  // rank or -1, NAME=VALUE or NAME
  std::vector<Action> actions;
};

/// PLUGIN.so and pairs of --NAME VALUE; an action is `--at
/// CALL[:rank=R|all][:comm=SLOT]:KIND[=...]`, or `--every` likewise. Throws std::invalid_argument
/// on anything it does not know.
Options parse(const std::vector<std::string>& arguments);
