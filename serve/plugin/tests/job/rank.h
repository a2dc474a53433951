// One rank process of the job.
#pragma once

#include <cstdint>

#include "tests/job/board.h"
#include "tests/job/options.h"

/// What the launcher tells a rank beside the command line.
struct RankStart {
  int rank;
  std::uint64_t job_id;
  Board* board;
  int log_descriptor;  // lines of one letter (L log, V violation, E error), a tab and text
};

/// Plays the rank's part to its end; returns the exit code.
int run_rank(const Options& options, const RankStart& start);
