// What a played job comes to, as one JSON document.
#pragma once

#include <string>
#include <vector>

#include "tests/job/checker.h"

struct RankEnd {
  bool exited = false;
  int exit_code = 0;
  int signal = 0;
  bool expected = true;  // of its own accord with 0, or killed because the job said so
};

struct JobEnd {
  double wall_s = 0;
  bool hit_deadline = false;
  std::vector<RankEnd> ranks;
  std::vector<std::string> logs;  // of each rank, as it wrote them
};

std::string to_json(const Options& options, const Checker& checker, const Board& board,
                    const JobEnd& end);
