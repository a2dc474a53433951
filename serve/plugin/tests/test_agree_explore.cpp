// The vote of agree/, explored: every interleaving of small worlds, and random schedules of large
// ones. The verdict is the law's own (design of the project, rank-consistency law, 2): never table
// beside abstain; no `init` fails while the communicator's ranks and one of the arbiter's two
// processes live and stops and cuts stay below the answer limit; every vote ends.
//
//   test_agree_explore worlds                      DYNAMICCL_FEW=1: the small ones
//   test_agree_explore random [schedules [seed]]   DYNAMICCL_FEW=1: fewer; DYNAMICCL_SEED
//   test_agree_explore word
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "tests/agree_world.h"
#include "tests/check.h"
#include "tests/word_world.h"

using namespace dynamiccl;

namespace {

/// 128 bits stand for a state: two of ten million are taken for one with a probability of 1e-25.
struct Seen {
  struct Digest {
    std::uint64_t low, high;
    bool operator==(const Digest& other) const { return low == other.low && high == other.high; }
  };
  struct Hash {
    std::size_t operator()(const Digest& digest) const { return digest.low; }
  };
  std::unordered_set<Digest, Hash> digests;

  bool add(const std::string& state) {
    Digest digest = {0xcbf29ce484222325U, 0x9e3779b97f4a7c15U};
    for (const char c : state) {
      digest.low = (digest.low ^ static_cast<unsigned char>(c)) * 0x100000001b3U;
      digest.high = (digest.high + static_cast<unsigned char>(c)) * 0xff51afd7ed558ccdU;
      digest.high ^= digest.high >> 29;
    }
    return digests.insert(digest).second;
  }
};

bool g_is_expected = false;  // what is found wrong is to be

template <typename World>
void tell(const char* name, const char* wrong, const World& world) {
  ++g_failures;
  if (g_is_expected) return;
  std::fprintf(stderr, "%s: %s, after:\n", name, wrong);
  for (const auto& action : world.path) {
    std::fprintf(stderr, "  %s %d %d\n", World::name_of(action), action.which, action.how);
  }
}

/// Every state that a world can come to.
template <typename World>
void explore(const char* name, const World& begin) {
  Seen seen;
  std::vector<World> open = {begin};
  seen.add(begin.state());
  while (!open.empty()) {
    const World world = std::move(open.back());
    open.pop_back();
    const auto actions = world.actions();
    if (const char* wrong = actions.empty() ? world.wrong_at_end() : nullptr) {
      return tell(name, wrong, world);
    }
    for (const auto& action : actions) {
      World next = world;
      next.act(action);
      if (const char* wrong = next.wrong()) return tell(name, wrong, next);
      if (seen.add(next.state())) open.push_back(std::move(next));
    }
  }
  std::printf("%s: %zu states\n", name, seen.digests.size());
  std::fflush(stdout);
}

void explore_worlds(bool few) {
  const Budget none = {};
  const auto with = [](int ranks, int workers, int keepers, int stops, int cuts, int late,
                       int strangers = 0) {
    return Budget{ranks, workers, keepers, stops, cuts, late, strangers};
  };
  const Setup small[] = {
      {"two ranks, nothing fails", 2, none},
      {"three ranks, nothing fails", 3, none},
      {"two ranks, two rounds", 2, none, 2},
      {"a rank differs", 2, with(1, 0, 0, 0, 0, 1), 1, 1},
      {"one of three never comes", 3, with(0, 0, 0, 0, 0, 0), 1, -1, 2},
      {"a rank is killed", 2, with(1, 0, 0, 0, 0, 1)},
      {"the worker is killed", 2, with(0, 1, 0, 0, 0, 0)},
      {"the worker is killed, and one is late", 2, with(0, 1, 0, 0, 0, 1)},
      {"the worker is killed twice", 2, with(0, 2, 0, 0, 0, 0)},
      {"keeper and worker are killed", 2, with(0, 1, 1, 0, 0, 0, 1)},
      {"a process stands still", 2, with(0, 0, 0, 1, 0, 0)},
      {"a connection is cut", 2, with(0, 0, 0, 0, 1, 0)},
      {"the log is full", 2, with(0, 1, 0, 0, 0, 0), 1, -1, -1, Second::kNone, true},
      {"two disjoint shrinks", 2, none, 1, -1, -1, Second::kShrinks},
  };
  const Setup large[] = {
      {"three ranks, the worker is killed", 3, with(0, 1, 0, 0, 0, 0)},
      {"three ranks, a connection is cut", 3, with(0, 0, 0, 0, 1, 0)},
      {"two rounds, the worker is killed", 2, with(0, 1, 0, 0, 0, 0), 2},
      {"two rounds, a connection is cut", 2, with(0, 0, 0, 0, 1, 0), 2},
      {"two rounds, a process stands still", 2, with(0, 0, 0, 1, 0, 0), 2},
      {"two connections are cut", 2, with(0, 0, 0, 0, 2, 0)},
      {"killed and cut", 2, with(0, 1, 0, 0, 1, 0)},
      {"killed and stopped", 2, with(0, 1, 0, 1, 0, 0)},
      {"two communicators", 2, none, 1, -1, -1, Second::kOtherId},
      {"four ranks, nothing fails", 4, none},
      {"two rounds, killed, cut and late", 2, with(0, 1, 0, 0, 1, 1), 2},
      {"killed twice, cut twice", 2, with(0, 2, 0, 0, 2, 0)},
      {"a rank and the worker are killed, one is late", 2, with(1, 1, 0, 0, 0, 1)},
      {"both are killed, one is cut", 2, with(0, 1, 1, 0, 1, 0, 1)},
      {"three ranks, killed and cut", 3, with(0, 1, 0, 0, 1, 0)},
      {"three ranks, one is late", 3, with(0, 0, 0, 0, 0, 1)},
      {"cut and stopped", 2, with(0, 0, 0, 1, 1, 0)},
  };
  for (const Setup& setup : small) explore(setup.name, AgreeWorld(setup));
  // The explorer would see an arbiter that lives in a rank of another communicator.
  const int failures = g_failures.exchange(0);
  g_is_expected = true;
  explore("an arbiter inside a rank, which must fail",
          AgreeWorld({"inside", 2, with(1, 0, 0, 0, 0, 0), 1, -1, -1, Second::kOtherId, false, 2}));
  g_is_expected = false;
  const bool is_found = g_failures.exchange(failures) == 1;
  CHECK(is_found);
  if (few) return;
  for (const Setup& setup : large) explore(setup.name, AgreeWorld(setup));
}

void play_at_random(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto below = [&random](int count) {
    return static_cast<int>(random() % static_cast<std::uint64_t>(count));
  };
  Setup setup = {"random"};
  setup.num_ranks = 2 + below(below(8) == 0 ? 30 : 5);
  setup.num_rounds = 1 + below(3);
  if (below(8) == 0) setup.differs = below(setup.num_ranks);
  if (below(8) == 0) setup.never_comes = below(setup.num_ranks);
  if (below(8) == 0) setup.second = below(2) == 0 ? Second::kOtherId : Second::kShrinks;
  setup.log_is_full = below(16) == 0;
  const auto few_of = [&below](int count) { return below(2) * below(count); };
  setup.budget = {few_of(2), few_of(4), few_of(2), few_of(2), few_of(4), few_of(4), few_of(2)};
  AgreeWorld world(setup);
  for (int i = 0; i < 2'000 * setup.num_ranks; ++i) {
    std::vector<Action> actions = world.actions();
    if (actions.empty()) {
      if (world.wrong_at_end() != nullptr) break;
      return;
    }
    // Disturbances are rare, or there would be nothing to disturb.
    const auto disturbs = [](const Action& action) {
      return action.what >= What::kTakeAndDie && action.what != What::kGoOnRank &&
             action.what != What::kGoOnWorker;
    };
    Action action = actions[random() % actions.size()];
    for (int again = 0; again < 20 && disturbs(action); ++again) {
      action = actions[random() % actions.size()];
    }
    world.act(action);
    if (world.wrong() != nullptr) break;
  }
  const char* wrong = world.wrong();
  if (wrong == nullptr) wrong = world.wrong_at_end();
  if (wrong == nullptr) wrong = "it never ends";
  std::fprintf(stderr, "seed %" PRIu64 ": ", seed);
  tell(setup.name, wrong, world);
}

}  // namespace

int main(int argc, char** argv) {
  const bool few = std::getenv("DYNAMICCL_FEW") != nullptr;
  const std::string_view what = argc > 1 ? argv[1] : "";
  if (what == "worlds") {
    explore_worlds(few);
  } else if (what == "word") {
    for (const WordSetup& setup : kWordSetups) explore(setup.name, WordWorld(setup));
  } else {
    const char* seed = argc > 3 ? argv[3] : std::getenv("DYNAMICCL_SEED");
    const std::uint64_t schedules = argc > 2 ? std::strtoull(argv[2], nullptr, 10)
                                    : few    ? 2'000
                                             : 100'000;
    const std::uint64_t first =
        (seed != nullptr ? std::strtoull(seed, nullptr, 10) : 0) * 1'000'000;
    for (std::uint64_t i = 0; i < schedules && g_failures == 0; ++i) play_at_random(first + i);
    std::printf("%" PRIu64 " random schedules from seed %" PRIu64 "\n", schedules, first);
  }
  return g_failures;
}
