// The releases of NCCL, read in their sources (`src/misc/tuner.cc`, `src/plugin/*.cc`,
// `src/init.cc`).
#include "tests/job/release.h"

#include <stdexcept>

namespace {

const std::vector<Release>& releases() {
  static const std::vector<Release> all = {
      {"2.22", 22203, {3}, {}, 6, false, false},
      {"2.23", 22304, {3}, {}, 7, false, false},
      {"2.24", 22403, {4, 3}, {}, 7, false, false},
      {"2.25", 22501, {4, 3}, {}, 7, false, false},
      {"2.26", 22606, {4, 3}, {}, 7, false, false},
      {"2.27", 22707, {4, 3}, {4}, 7, false, false},
      {"2.28", 22809, {5, 4, 3}, {5, 4}, 7, true, false},
      {"2.29", 22907, {5, 4, 3}, {6, 5, 4}, 7, true, true},
      {"2.30", 23007, {6, 5, 4, 3}, {6, 5, 4}, 7, true, true},
      // Stands for a release that was not read.
      {"2.31", 23102, {6, 5, 4, 3}, {6, 5, 4}, 7, true, true},
  };
  return all;
}

}  // namespace

const Release& release_named(const std::string& name) {
  std::string choices;
  for (const Release& release : releases()) {
    if (release.name == name) return release;
    choices += (choices.empty() ? "" : ", ") + release.name;
  }
  throw std::invalid_argument("no release '" + name + "'; choose from " + choices);
}
