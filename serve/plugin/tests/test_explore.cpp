// Explores the agreement: exhaustively where the world is small, by random schedules where it is
// not.
//
//   test_explore PLUGIN DIRECTORY     the suite (about a million random schedules)
//   test_explore random COUNT SEED    more random schedules
//
// Disagreement must be 0 in every state that can be reached, and every wait must end.
#include <cstring>
#include <random>
#include <unordered_set>

#include "tests/check.h"
#include "tests/explore.h"

namespace {

using dynamiccl::Clock;
using dynamiccl::Rules;
using dynamiccl::World;

struct Found {
  std::size_t states = 0;
  std::size_t ends = 0;
  std::size_t with_table = 0;  // ends at which some calls were answered from the agreed table
  std::size_t failed = 0;      // ends at which a communicator failed
  std::size_t disagreements = 0;
  std::size_t endless = 0;
};

void show(const Rules& rules, const std::vector<int>& path) {
  World world(rules);
  world.trace = true;
  for (const int choice : path) {
    world.choices();
    world.take(choice);
  }
}

/// Depth first over all choices; a state seen before is not gone through again. The objects cannot
/// be copied, so each state is reached by playing its choices from the start.
Found explore(const Rules& rules, std::size_t most_states) {
  Found found;
  std::unordered_set<std::uint64_t> seen;
  std::vector<int> path;
  std::vector<int> widths;
  for (;;) {
    auto world = std::make_unique<World>(rules);
    bool at_end = false;
    for (const int choice : path) {
      world->choices();
      world->take(choice);
    }
    for (;;) {
      if (const int call = world->disagreement()) {
        if (found.disagreements++ == 0) {
          std::fprintf(stderr, "disagreement at call %d:\n", call);
          show(rules, path);
        }
        break;
      }
      if (!seen.insert(world->digest()).second) break;
      ++found.states;
      const int width = world->choices();
      if (width == 0 || found.states >= most_states) {
        ++found.ends;
        at_end = true;
        break;
      }
      path.push_back(0);
      widths.push_back(width);
      world->take(0);
    }
    if (at_end && world->disagreement() == 0) {
      if (!world->run_out() && found.endless++ == 0) show(rules, path);
      found.with_table += world->calls_with_table() > 0;
      found.failed += world->any_failed();
      if (world->disagreement() != 0 && found.disagreements++ == 0) show(rules, path);
    }
    while (!path.empty() && path.back() + 1 == widths.back()) {
      path.pop_back();
      widths.pop_back();
    }
    if (path.empty() || found.states >= most_states) return found;
    ++path.back();
  }
}

Found wander(std::size_t schedules, std::uint64_t seed) {
  Found found;
  std::mt19937_64 random(seed);
  const auto below = [&](int bound) {
    return static_cast<int>(random() % static_cast<unsigned>(bound));
  };
  for (std::size_t i = 0; i < schedules; ++i) {
    Rules rules;
    rules.num_ranks = 2 + below(4);
    rules.num_calls = 4 + below(28);
    rules.span = 1 + static_cast<std::uint64_t>(below(6));
    rules.num_proposals = 1 + below(3);
    rules.simulates = below(3) == 0 ? below(4) : 0;
    rules.sends = below(3) == 0 ? below(4) : 0;
    rules.group = below(2) == 0 ? 1 : 1 + below(4);
    rules.crashes = below(3) == 0 ? below(3) : 0;
    rules.drops = below(2) == 0 ? below(12) : 0;
    rules.repeats = below(40);
    rules.timeouts = below(3) == 0 ? below(4) : 0;
    rules.lasting_waits = below(4) == 0 ? below(3) : 0;
    World world(rules);
    std::vector<int> path;
    int width = 0;
    while ((width = world.choices()) > 0) {
      path.push_back(below(width));
      world.take(path.back());
      if (world.disagreement() != 0) break;
      ++found.states;
    }
    if (world.disagreement() == 0) {
      if (!world.run_out() && found.endless++ == 0) show(rules, path);
      found.with_table += world.calls_with_table() > 0;
      found.failed += world.any_failed();
    }
    if (world.disagreement() != 0 && found.disagreements++ == 0) {
      std::fprintf(stderr, "disagreement in schedule %zu\n", i);
      show(rules, path);
    }
    ++found.ends;
  }
  return found;
}

void report(const char* what, const Found& found) {
  std::printf(
      "%s: %zu states, %zu ends, %zu with the table, %zu failed, %zu disagreements, %zu endless\n",
      what, found.states, found.ends, found.with_table, found.failed, found.disagreements,
      found.endless);
  std::fflush(stdout);
  CHECK(found.disagreements == 0);
  CHECK(found.endless == 0);
  CHECK(found.with_table > 0);
}

}  // namespace

int main(int count, char** arguments) {
  if (count == 4 && std::strcmp(arguments[1], "random") == 0) {
    report("random", wander(std::strtoull(arguments[2], nullptr, 10),
                            std::strtoull(arguments[3], nullptr, 10)));
    return g_failures;
  }
  struct Small {
    const char* what;
    int ranks, calls, drops, repeats, timeouts, crashes, simulates, sends, group;
  };
  // Small enough to go through to the end.
  const Small worlds[] = {
      {"2 ranks", 2, 3, 0, 0, 0, 0, 0, 0, 1},
      {"2 ranks, a loss", 2, 3, 1, 0, 0, 0, 0, 0, 1},
      {"2 ranks, a timeout", 2, 2, 0, 0, 1, 0, 0, 0, 1},
      {"2 ranks, a crash", 2, 3, 0, 0, 0, 1, 0, 0, 1},
      {"2 ranks, a simulated call", 2, 3, 0, 0, 0, 0, 1, 0, 1},
      {"2 ranks, a group of 2 and a simulated call", 2, 4, 0, 0, 0, 0, 1, 0, 2},
      {"2 ranks, a send and a simulated call", 2, 3, 0, 0, 0, 0, 1, 1, 1},
      {"2 ranks, two sends", 2, 3, 0, 0, 0, 0, 0, 2, 1},
      {"3 ranks", 3, 2, 0, 0, 0, 0, 0, 0, 1},
      {"3 ranks, a crash", 3, 1, 0, 0, 0, 1, 0, 0, 1},
  };
  // Under a sanitizer, and in the quick look of `make test`.
  const bool few = std::getenv("DYNAMICCL_FEW") != nullptr;
  const std::size_t most = few ? 3'000 : 600'000;
  for (const Small& small : worlds) {
    Rules rules;
    rules.num_ranks = small.ranks;
    rules.num_calls = small.calls;
    rules.drops = small.drops;
    rules.repeats = small.repeats;
    rules.timeouts = small.timeouts;
    rules.crashes = small.crashes;
    rules.simulates = small.simulates;
    rules.sends = small.sends;
    rules.group = small.group;
    const Found found = explore(rules, most);
    report(small.what, found);
    CHECK(few || found.states < most);
  }
  const char* seed = std::getenv("DYNAMICCL_SEED");
  report("random", wander(few ? 5'000 : 1'000'000,
                          seed != nullptr ? std::strtoull(seed, nullptr, 10) : 20261121));
  return g_failures;
}
