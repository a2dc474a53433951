// The vote of agree/, explored: every interleaving of small worlds, and random schedules of large
// ones. The verdict is the law's own (design of the project, rank-consistency law, 2): never table
// beside abstain; no two tables for one call; no `init` and no call fails while the communicator's
// ranks and one of the arbiter's two processes live and stops and cuts stay below the answer limit;
// every vote ends.
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
  const auto of_calls = [](Setup setup, const char* calls, int least_decided = 0,
                           const char* calls_of_last = "=", std::uint64_t span_calls = 1) {
    setup.calls = calls;
    setup.calls_of_last = calls_of_last;
    setup.least_decided = least_decided;
    setup.span_calls = span_calls;
    return setup;
  };
  /// Past `init`: the stops are what is explored.
  const auto begun = [&of_calls](Setup setup, const char* calls, int least_decided = 0,
                                 const char* calls_of_last = "=", std::uint64_t first_stop = 1) {
    setup = of_calls(setup, calls, least_decided, calls_of_last);
    setup.has_begun = true;
    setup.first_stop = first_stop;
    return setup;
  };
  const auto in_process_of = [&begun](int ranks_per_process, Setup setup, const char* calls) {
    setup = begun(setup, calls);
    setup.ranks_per_process = ranks_per_process;
    return setup;
  };
  /// A stop that is disturbed, and enough calls for another one that succeeds.
  const auto succeeds_later = [&begun](Setup setup) {
    setup = begun(setup, std::string(1'200, 'a').c_str(), 1);
    setup.gap_calls = 2'000;
    return setup;
  };
  const auto in_opposite_order = [&begun](Setup setup) {
    setup.second = Second::kSameProcesses;
    std::string calls, opposite;
    for (int i = 0; i < 60; ++i) calls += "ab", opposite += "ba";
    setup = begun(setup, calls.c_str(), 1, opposite.c_str());
    setup.span_calls = 4;
    setup.gap_calls = 2'000;
    return setup;
  };
  const auto abort_and = [&with](int ranks, int workers, int cuts, int late) {
    Budget budget = with(ranks, workers, 0, 0, cuts, late);
    budget.aborts = 1;
    return budget;
  };
  const auto skip_and = [&with](int workers, int late) {
    Budget budget = with(0, workers, 0, 0, 0, late);
    budget.skips = 1;
    return budget;
  };
  const Setup small[] = {
      {"two ranks, nothing fails", 2, none},
      {"three ranks, nothing fails", 3, none},
      {"a rank differs", 2, with(1, 0, 0, 0, 0, 1), 1},
      {"one of three never comes", 3, with(0, 0, 0, 0, 0, 0), -1, 2},
      {"a rank is killed", 2, with(1, 0, 0, 0, 0, 1)},
      {"the worker is killed", 2, with(0, 1, 0, 0, 0, 0)},
      {"the worker is killed, and one is late", 2, with(0, 1, 0, 0, 0, 1)},
      {"the worker is killed twice", 2, with(0, 2, 0, 0, 0, 0)},
      {"keeper and worker are killed", 2, with(0, 1, 1, 0, 0, 0, 1)},
      {"a process stands still", 2, with(0, 0, 0, 1, 0, 0)},
      {"a connection is cut", 2, with(0, 0, 0, 0, 1, 0)},
      {"the log is full", 2, with(0, 1, 0, 0, 0, 0), -1, -1, Second::kNone, true},
      {"two disjoint shrinks", 2, none, -1, -1, Second::kShrinks},
      of_calls({"init and two stops", 2, none}, "aaa", 2),
      begun({"three ranks, two stops", 3, none}, "aa", 2),
      succeeds_later({"a stop, the worker is killed", 2, with(0, 1, 0, 0, 0, 0)}),
      succeeds_later({"a stop, a connection is cut", 2, with(0, 0, 0, 0, 1, 0)}),
      succeeds_later({"a stop, and one is late", 2, with(0, 0, 0, 0, 0, 1)}),
      begun({"a stop, a rank is killed", 2, with(1, 0, 0, 0, 0, 1)}, "a"),
      begun({"a stop, a process stands still", 2, with(0, 0, 0, 1, 0, 0)}, "a"),
      begun({"a stop, keeper and worker are killed", 2, with(0, 1, 1, 0, 0, 0, 1)}, "aaa"),
      succeeds_later({"a rank leaves a stop out", 2, skip_and(0, 0)}),
      succeeds_later({"a rank leaves a stop out, the worker is killed", 2, skip_and(1, 0)}),
      begun({"an abort inside a stop", 2, abort_and(0, 0, 0, 0)}, "aaa"),
      begun({"an abort inside a stop, the worker is killed", 2, abort_and(0, 1, 0, 0)}, "aaa"),
      begun({"one simulates a call", 2, none}, "aaaa", 0, "asaaa"),
      begun({"one simulates a call, and one is late", 2, with(0, 0, 0, 0, 0, 1)}, "aaa", 0, "saaa"),
      begun({"one simulates a call before the stop", 2, none}, "aaaaa", 0, "asaaaa", 4),
      begun({"one simulates a call at the stop", 2, none}, "aaaa", 0, "aasaa", 3),
      begun({"all capture at the stop", 2, none}, "acca", 3),
      begun({"one captures at the stop", 2, none}, "aaaa", 0, "acaa", 2),
      begun({"one sees a shrink", 2, none}, "aaaa", 0, "aa-aa"),
      begun({"all see a shrink, the worker is killed", 2, with(0, 1, 0, 0, 0, 0)}, "aa-aa"),
      in_opposite_order({"opposite order", 2, none}),
      in_process_of(8, {"eight ranks on one thread", 8, none}, "aaa"),
      in_process_of(2, {"two processes of two ranks", 4, with(0, 0, 0, 0, 0, 1)}, "aaa"),
  };
  const Setup large[] = {
      {"three ranks, the worker is killed", 3, with(0, 1, 0, 0, 0, 0)},
      {"three ranks, a connection is cut", 3, with(0, 0, 0, 0, 1, 0)},
      of_calls({"init and a stop, the worker is killed", 2, with(0, 1, 0, 0, 0, 0)}, "aa"),
      of_calls({"init and a stop, a connection is cut", 2, with(0, 0, 0, 0, 1, 0)}, "aa"),
      of_calls({"init and a stop, a process stands still", 2, with(0, 0, 0, 1, 0, 0)}, "aa"),
      {"two connections are cut", 2, with(0, 0, 0, 0, 2, 0)},
      {"killed and cut", 2, with(0, 1, 0, 0, 1, 0)},
      {"killed and stopped", 2, with(0, 1, 0, 1, 0, 0)},
      {"two communicators", 2, none, -1, -1, Second::kSameProcesses},
      {"four ranks, nothing fails", 4, none},
      of_calls({"init and a stop, killed, cut and late", 2, with(0, 1, 0, 0, 1, 1)}, "a"),
      {"killed twice, cut twice", 2, with(0, 2, 0, 0, 2, 0)},
      {"a rank and the worker are killed, one is late", 2, with(1, 1, 0, 0, 0, 1)},
      {"both are killed, one is cut", 2, with(0, 1, 1, 0, 1, 0, 1)},
      {"three ranks, killed and cut", 3, with(0, 1, 0, 0, 1, 0)},
      {"three ranks, one is late", 3, with(0, 0, 0, 0, 0, 1)},
      {"cut and stopped", 2, with(0, 0, 0, 1, 1, 0)},
      begun({"two stops, a rank is killed", 2, with(1, 0, 0, 0, 0, 1)}, "aa"),
      begun({"two stops, a process stands still", 2, with(0, 0, 0, 1, 0, 0)}, "aa"),
      begun({"three ranks, stops, the worker is killed", 3, with(0, 1, 0, 0, 0, 0)}, "aaa"),
      begun({"stops, the worker is killed twice, one is late", 2, with(0, 2, 0, 0, 0, 1)}, "aaa"),
      begun({"stops, killed and cut", 2, with(0, 1, 0, 0, 1, 0)}, "aaa"),
      begun({"stops, killed and stopped", 2, with(0, 1, 0, 1, 0, 0)}, "aa"),
      begun({"stops, two connections are cut", 2, with(0, 0, 0, 0, 2, 0)}, "aa"),
      begun({"an abort, a cut, and one is late", 2, abort_and(0, 0, 1, 1)}, "aa"),
      begun({"an abort, and a rank is killed", 3, abort_and(1, 0, 0, 0)}, "aaa"),
      begun({"one simulates, the worker is killed", 2, with(0, 1, 0, 0, 0, 1)}, "aaaa", 0, "saaaa"),
      in_opposite_order({"opposite order, and one is late", 2, with(0, 0, 0, 0, 0, 1)}),
  };
  for (const Setup& setup : small) explore(setup.name, AgreeWorld(setup));
  // The explorer would see an arbiter that lives in a rank of another communicator.
  const int failures = g_failures.exchange(0);
  g_is_expected = true;
  explore(
      "an arbiter inside a rank, which must fail",
      AgreeWorld({"inside", 2, with(1, 0, 0, 0, 0, 0), -1, -1, Second::kOtherProcesses, false, 2}));
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
  const bool has_stops = below(3) > 0;
  for (int i = has_stops ? 2 + below(6) : 0; i > 0; --i) {
    setup.calls += below(8) == 0 ? "sc-c"[below(4)] : 'a';
  }
  if (has_stops && below(4) == 0) {
    setup.calls_of_last = setup.calls;
    setup.calls_of_last.insert(
        static_cast<std::size_t>(below(static_cast<int>(setup.calls.size()))), 1, "sca-"[below(4)]);
  }
  setup.first_stop = 1 + static_cast<std::uint64_t>(below(3));
  setup.span_calls = 1 + static_cast<std::uint64_t>(below(3));
  setup.has_begun = has_stops && below(2) == 0;
  if (below(8) == 0) setup.differs = below(setup.num_ranks);
  if (below(8) == 0) setup.never_comes = below(setup.num_ranks);
  if (below(6) == 0) {
    setup.second = static_cast<Second>(1 + below(setup.has_begun ? 2 : 3));
    for (std::size_t i = 0; setup.second == Second::kSameProcesses && i < setup.calls.size(); ++i) {
      if (below(2) == 0) setup.calls[i] = 'b';
    }
  }
  setup.log_is_full = below(16) == 0;
  const auto few_of = [&below](int count) { return below(2) * below(count); };
  setup.budget = {few_of(2), few_of(4), few_of(2), few_of(2), few_of(4),
                  few_of(4), few_of(2), few_of(3), few_of(3)};
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
