// Plays a whole job against a tuner and profiler plugin, as NCCL would, without NCCL and GPUs.
//
//   play_job PLUGIN.so [--NAME VALUE]...      options.h has the names; prints one JSON document
//
// Each rank is a process of its own. At every collective it is checked that all ranks would run the
// same algorithm, protocol, channels and chunk sizes: where they would not, a real job hangs.
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "tests/job/launcher.h"

int main(int count, char** arguments) {
  const std::vector<std::string> command(arguments, arguments + count);
  try {
    const Options options = parse({command.begin() + 1, command.end()});
    int exit_code = 0;
    if (is_rank(options, &exit_code)) return exit_code;
    std::fputs(launch(options, command).c_str(), stdout);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "play_job: %s\n", error.what());
    return 2;
  }
  return 0;
}
