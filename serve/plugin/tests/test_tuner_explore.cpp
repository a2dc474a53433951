// The agreement in `init`, explored: every interleaving of small worlds with what networks, jobs
// and hosts do to it, and random schedules of up to 64 ranks.
//
//   test_tuner_explore worlds                      DYNAMICCL_FEW=1: only their beginnings
//   test_tuner_explore random [schedules [seed]]   a million; DYNAMICCL_FEW=1: fewer;
//   DYNAMICCL_SEED
//
// What a world has: requests and answers that are lost, doubled, late and stale; a rank that never
// comes, comes after the answer or differs; an init that is aborted and tried again under the same
// id; two communicators at once, with two ids or with one; a rank that stands still with its clock;
// a coordinator that is replaced, or sleeps. What must hold: no two ranks of a communicator that
// exists differ; every init ends; one fails only where it had confirmed and a coordinator was lost;
// where nothing fails, all get the table.
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <unordered_set>
#include <vector>

#include "tests/check.h"
#include "tests/tuner_play.h"

namespace {

/// Lets a play run to its end without anything going wrong any more.
const char* finish(Play* play) {
  for (int i = 0; i < 200'000; ++i) {
    play->exchange_all();
    if (!play->let_time_pass()) return play->verdict();
  }
  return "it never ends";
}

Play replay(const World& world, const std::vector<Action>& path) {
  Play play(world);
  for (const Action& action : path) {
    if (action.index == -1) {
      play.let_time_pass();
    } else {
      play.act(action);
    }
  }
  return play;
}

/// Every schedule of a world whose messages are exchanged at most `depth` times; then the rest of
/// each goes its way in peace. Returns how many states it saw.
std::size_t explore(const char* name, const World& world, std::size_t depth) {
  std::unordered_set<std::string> seen;
  std::vector<std::vector<Action>> open = {{}};
  const int failures = g_failures;
  while (!open.empty() && g_failures == failures) {
    const std::vector<Action> path = std::move(open.back());
    open.pop_back();
    Play play = replay(world, path);
    if (!seen.insert(play.state()).second) continue;
    std::vector<Action> choices = play.choices();
    if (play.is_quiet()) choices.push_back({Kind::kSend, -1});
    if (path.size() < depth) {
      for (const Action& choice : choices) {
        open.push_back(path);
        open.back().push_back(choice);
      }
    }
    if (const char* wrong = finish(&play)) {
      std::fprintf(stderr, "%s: %s after", name, wrong);
      for (const Action& action : path) {
        std::fprintf(stderr, " %d:%d", static_cast<int>(action.kind), action.index);
      }
      std::fprintf(stderr, "\n");
      ++g_failures;
    }
  }
  std::printf("%s: %zu states\n", name, seen.size());
  return seen.size();
}

void play_at_random(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto below = [&random](int count) {
    return static_cast<int>(random() % static_cast<std::uint64_t>(count));
  };
  World world;
  world.num_ranks = 2 + below(below(8) == 0 ? 63 : 5);
  if (below(8) == 0) world.differs = below(world.num_ranks);
  if (below(8) == 0) world.objects = below(world.num_ranks);
  if (below(8) == 0) world.never_comes = below(world.num_ranks);
  if (below(8) == 0) world.late = true;
  if (below(8) == 0) world.second = Second::kOther;
  if (below(16) == 0) world.second = Second::kSplit;
  if (below(16) == 0) world.second = Second::kGrown;
  world.budget = {below(5), below(5), below(5), below(3), below(2), below(2), below(2)};
  // What a replaced coordinator does not know: note_id.
  if (world.second == Second::kGrown) world.budget.crashed = 0;
  Play play(world);
  for (int i = 0; i < 20 * world.num_ranks; ++i) {
    const std::vector<Action> choices = play.choices();
    if (choices.empty()) {
      if (!play.let_time_pass()) break;
    } else {
      play.act(choices[random() % choices.size()]);
    }
  }
  if (const char* wrong = finish(&play)) {
    std::fprintf(stderr, "seed %" PRIu64 ": %s\n", seed, wrong);
    ++g_failures;
  }
}

void explore_worlds(bool few) {
  explore("two ranks, nothing fails", {2, -1, -1, -1, {}}, 60);
  explore("three ranks, nothing fails", {3, -1, -1, -1, {}}, 60);
  explore("one is lost", {2, -1, -1, -1, {1, 0, 0, 0, 0, 0}}, 40);
  explore("one is doubled, one late", {2, -1, -1, -1, {0, 1, 1, 0, 0, 0}}, few ? 20 : 40);
  explore("an init is aborted", {2, -1, -1, -1, {0, 0, 0, 1, 0, 0}}, 40);
  explore("aborted, and a late one", {2, -1, -1, -1, {0, 0, 1, 1, 0, 0}}, few ? 14 : 30);
  explore("a coordinator is replaced", {2, -1, -1, -1, {0, 0, 1, 0, 1, 0}}, few ? 16 : 40);
  explore("replaced, whole", {2, -1, -1, -1, {1, 0, 0, 0, 1, 0}, true}, few ? 12 : 40);
  explore("replaced, three ranks", {3, -1, -1, -1, {1, 0, 0, 0, 1, 0}, true}, few ? 9 : 40);
  explore("replaced twice, one aborted", {2, -1, -1, -1, {1, 0, 0, 1, 2, 0}, true}, few ? 9 : 40);
  explore("replaced and asleep", {2, -1, -1, -1, {1, 0, 0, 0, 1, 1}, true}, few ? 9 : 40);
  explore("all of it", {2, -1, -1, -1, {1, 0, 0, 1, 1, 1}, true}, few ? 8 : 30);
  explore("a coordinator sleeps", {2, -1, -1, -1, {0, 0, 1, 0, 0, 1}}, few ? 16 : 40);
  explore("a rank differs", {2, 1, -1, -1, {1, 0, 1, 0, 0, 0}}, 40);
  explore("a rank objects", {2, -1, 1, -1, {1, 0, 1, 0, 0, 0}}, 40);
  explore("a rank stands still", {2, -1, -1, -1, {1, 0, 0, 0, 0, 0, 1}}, few ? 16 : 40);
  explore("a rank and its coordinator", {2, -1, -1, -1, {0, 0, 0, 0, 1, 0, 1}, true},
          few ? 12 : 40);
  explore("a rank comes after the answer",
          {2, -1, -1, -1, {1, 0, 0, 0, 0, 0}, false, Second::kNone, true}, few ? 16 : 40);
  explore("two communicators", {2, -1, -1, -1, {}, true, Second::kOther}, 40);
  explore("two, and a message is lost", {2, -1, -1, -1, {1, 0, 0, 0, 0, 0}, true, Second::kOther},
          few ? 10 : 40);
  explore("two of one id", {2, -1, -1, -1, {1, 0, 0, 1, 1, 0}, true, Second::kSplit},
          few ? 10 : 40);
  explore("two of one id, grown", {3, -1, -1, -1, {1, 0, 0, 0, 0, 0}, true, Second::kGrown},
          few ? 12 : 40);
  explore("a rank never comes", {3, -1, -1, 2, {1, 0, 0, 0, 0, 1}}, few ? 11 : 30);
  explore("three ranks, one aborted", {3, -1, -1, -1, {0, 0, 0, 1, 0, 0}}, few ? 12 : 16);
  explore("four ranks, nothing fails", {4, -1, -1, -1, {}}, few ? 16 : 40);
}

}  // namespace

int main(int argc, char** argv) {
  const bool few = std::getenv("DYNAMICCL_FEW") != nullptr;
  if (argc > 1 && std::strcmp(argv[1], "worlds") == 0) {
    explore_worlds(few);
    return g_failures;
  }
  const char* seed = argc > 3 ? argv[3] : std::getenv("DYNAMICCL_SEED");
  const std::uint64_t schedules = argc > 2 ? std::strtoull(argv[2], nullptr, 10)
                                  : few    ? 2'000
                                           : 1'000'000;
  const std::uint64_t first = (seed != nullptr ? std::strtoull(seed, nullptr, 10) : 0) * 1'000'000;
  for (std::uint64_t i = 0; i < schedules && g_failures == 0; ++i) play_at_random(first + i);
  std::printf("%" PRIu64 " random schedules from seed %" PRIu64 "\n", schedules, first);
  return g_failures;
}
