// Starts the rank processes, does what they ask for, and ends them all.
#pragma once

#include <string>
#include <vector>

#include "tests/job/options.h"

/// Plays the job to its end and returns what it came to, as JSON. `command` is how this program was
/// called; each rank is the same program called again.
std::string launch(const Options& options, const std::vector<std::string>& command);

/// If this process was started as a rank of a job, plays its part and returns true.
bool is_rank(const Options& options, int* exit_code);
