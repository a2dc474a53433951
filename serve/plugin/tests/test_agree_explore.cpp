// The vote of agree/, explored: every interleaving of small worlds, and random schedules of large
// ones. The verdict is the law's own (design of the project, rank-consistency law, 2): never table
// beside abstain; no two tables for one call; no `init` and no call fails while the communicator's
// ranks and one of the arbiter's two processes live and stops and cuts stay below the answer limit;
// every vote ends.
//
//   test_agree_explore worlds [NAME] | random | word     DYNAMICCL_FEW=1; DYNAMICCL_SEED: others
#include <cinttypes>
#include <cstdlib>
#include <memory>
#include <random>
#include <string_view>
#include <unordered_set>

#include "agree/word.h"
#include "tests/agree_world.h"
#include "tests/check.h"

using namespace dynamiccl;

namespace {

void tell(const char* name, const char* wrong, const World& world) {
  std::fprintf(stderr, "%s: %s, after:\n", name, wrong);
  for (const World::Event& event : world.path) {
    std::fprintf(stderr, "  %s %zu %zu\n", event.what, event.which, event.how);
  }
}

/// Whether nothing is wrong in any state that a world can come to.
template <typename Small>
bool explore(const char* name, const Small& begin, bool is_told = true) {
  std::unordered_set<std::uint64_t> seen = {begin.state().digest};
  std::vector<Small> open = {begin};
  while (!open.empty()) {
    Small world = std::move(open.back());
    open.pop_back();
    const int count = world.happen(-1);
    if (const char* wrong = world.wrong(count == 0)) {
      if (is_told) tell(name, wrong, world);
      return false;
    }
    for (int chosen = 0; chosen < count; ++chosen) {
      Small next = world;
      next.happen(chosen);
      if (seen.insert(next.state().digest).second) open.push_back(std::move(next));
    }
  }
  std::printf("%s: %zu states\n", name, seen.size());
  return true;
}

/// A small world for the word of `agree/word.h`: ranks of one host, the files that they open, and
/// what happens to them. Every atomic step of a rank is a choice of its own.
struct WordWorld final : World {
  explicit WordWorld(const Setup& setup) : setup_(&setup) {
    left_ = setup.with;
    for (int i = 0; i < setup.num_communicators() * setup.num_ranks; ++i) {
      const auto vote = std::make_shared<const Vote>(setup.vote_of(i));
      ranks_.push_back({vote, WordVote(vote.get()), i / setup.num_ranks});
    }
  }

  int happen(int chosen) {
    chosen_ = chosen;
    count_ = 0;
    for (std::size_t i = 0; i < ranks_.size(); ++i) {
      Rank& rank = ranks_[i];
      if (is_out(rank) || is_done(rank)) continue;
      if (!rank.board) {
        may("open", i, [&] { rank.board = boards_.size() - 1; });
        may_once('u', "open fails", i, 0, [&] { rank.failed = true; });
      } else if (rank.vote.step == WordVote::Step::kWait && boards_[*rank.board].word == 0) {
        may_once('t', "time is up", i, 0, [&] { step(&rank, true); });
      } else {
        may("step", i, [&] { step(&rank, false); });
      }
      may_once('r', "kill", i, 0, [&] { rank.dead = true; });
    }
    return count_;
  }

  const char* wrong(bool is_over) const {
    for (const Rank& rank : ranks_) {
      if (has_table(rank) && setup_->is('d')) return "a table, and one differs";
      for (const Rank& other : ranks_) {
        if (other.comm != rank.comm || !has_table(rank)) continue;
        if (other.failed || (is_done(other) && !has_table(other))) return "table beside abstain";
      }
      if (!is_over || is_out(rank)) continue;
      if (!is_done(rank) && has('t')) return "it hangs";
      if (setup_->with.empty() && !has_table(rank))
        return "nothing went wrong, and it has no table";
    }
    return nullptr;
  }

  State state() const {
    State out;
    for (const Rank& rank : ranks_) {
      out.put(rank.vote.step, rank.board.value_or(99), rank.dead, rank.failed,
              rank.vote.has_table(), rank.vote.came_last);
    }
    for (const Copied<Board>& board : boards_) {
      out.put(WordVote::state_of(board.word), board.votes.load(), board.digest.load());
    }
    out.put(boards_.size());
    for (const char letter : left_) out.put(letter);
    return out;
  }

  struct Rank {
    std::shared_ptr<const Vote> own;
    WordVote vote;
    int comm;
    std::optional<std::size_t> board = {};
    bool dead = false;
    bool failed = false;
  };
  bool is_out(const Rank& rank) const {
    return rank.dead || rank.failed || (setup_->is('n') && setup_->is_last(*rank.own));
  }
  static bool is_done(const Rank& rank) { return rank.vote.step == WordVote::Step::kDone; }
  static bool has_table(const Rank& rank) { return is_done(rank) && rank.vote.has_table(); }

  void step(Rank* rank, bool is_time_up) {
    rank->vote.take(&boards_[*rank->board], is_time_up);
    // Whoever comes last takes the name away, whatever lies under it by then.
    if (is_done(*rank) && rank->vote.came_last) boards_.emplace_back();
  }

  const Setup* setup_;
  std::vector<Copied<Board>> boards_ = {{}};  // files; the last one has the name, if any has
  std::vector<Rank> ranks_;
};

/// A stop that is disturbed, and enough calls for another one that succeeds.
Setup succeeds_later(const char* name, const char* with) {
  return {name, 2, with, "|" + std::string(1'200, 'a'), "=", 1, 2, 1, 2'000};
}
Setup in_opposite_order(const char* name, const char* with) {
  std::string calls = "|", opposite;
  for (int i = 0; i < 60; ++i) {
    calls += "ab";
    opposite += "ba";
  }
  return {name, 2, with, calls, opposite, 1, 2, 4, 2'000};
}

const Setup kSmall[] = {
    {"two ranks, nothing happens", 2},
    {"three ranks, nothing happens", 3},
    {"a rank differs", 2, "rld"},
    {"one of three never comes", 3, "n"},
    {"a rank is killed", 2, "rl"},
    {"the worker is killed, and one is late", 2, "wl"},
    {"the worker is killed twice", 2, "ww"},
    {"keeper and worker are killed", 2, "wkx"},
    {"a process stands still", 2, "s"},
    {"a connection is cut", 2, "c"},
    {"the log is full", 2, "wf"},
    {"two disjoint shrinks", 2, "h"},
    {"init and two stops", 2, "", "aaa", "=", 1, 3},
    {"three ranks, two stops", 3, "", "|aa", "=", 1, 3},
    succeeds_later("a stop, the worker is killed", "w"),
    succeeds_later("a stop, a connection is cut", "c"),
    succeeds_later("a stop, and one is late", "l"),
    succeeds_later("a rank leaves a stop out, the worker is killed", "ow"),
    {"a stop, a rank is killed", 2, "rl", "|a"},
    {"a stop, a process stands still", 2, "s", "|a"},
    {"stops, keeper and worker are killed", 2, "wkx", "|aaa"},
    {"an abort inside a stop, the worker is killed", 2, "aw", "|aaa"},
    {"one simulates a call", 2, "", "|aaaa", "asaaa"},
    {"one simulates a call, and one is late", 2, "l", "|aaa", "saaa"},
    {"one simulates a call before the stop", 2, "", "|aaaaa", "asaaaa", 4},
    {"one simulates a call at the stop", 2, "", "|aaaa", "aasaa", 3},
    {"all capture at the stop", 2, "", "|acca", "=", 1, 4},
    {"one captures at the stop", 2, "", "|aaaa", "acaa", 2},
    {"one sees a shrink", 2, "", "|aaaa", "aa-aa"},
    {"all see a shrink, the worker is killed", 2, "w", "|aa-aa"},
    in_opposite_order("opposite order", "2"),
    {"eight ranks on one thread", 8, "", "|aaa", "=", 1, 0, 1, 1, 8},
    {"two processes of two ranks", 4, "l", "|aaa", "=", 1, 0, 1, 1, 2},
};
const Setup kLarge[] = {
    {"init and stops, the worker is killed", 2, "w", "aa"},
    {"init and stops, a connection is cut", 2, "c", "aa"},
    {"init and stops, a process stands still", 2, "s", "aa"},
    {"killed and stopped", 2, "ws"},
    {"two communicators", 2, "2"},
    {"four ranks, nothing happens", 4},
    {"init and a stop, killed, cut and late", 2, "wcl", "a"},
    {"killed twice, cut twice", 2, "wwcc"},
    {"a rank and the worker are killed, one is late", 2, "rwl"},
    {"keeper and worker are killed, one is cut", 2, "wkcx"},
    {"three ranks, killed and cut", 3, "wc"},
    {"three ranks, one is late", 3, "l"},
    {"cut and stopped", 2, "cs"},
    {"two stops, a rank is killed", 2, "rl", "|aa"},
    {"two stops, a process stands still", 2, "s", "|aa"},
    {"three ranks, stops, the worker is killed", 3, "w", "|aaa"},
    {"stops, the worker is killed twice, one is late", 2, "wwl", "|aaa"},
    {"stops, killed and cut", 2, "wc", "|aaa"},
    {"stops, killed and stopped", 2, "ws", "|aa"},
    {"stops, two connections are cut", 2, "cc", "|aa"},
    {"an abort, a cut, and one is late", 2, "acl", "|aa"},
    {"an abort, and a rank is killed", 3, "ar", "|aaa"},
    {"one simulates, killed and late", 2, "wl", "|aaaa", "saaaa"},
    in_opposite_order("opposite order, and one is late", "2l"),
};
const Setup kWords[] = {
    {"three ranks", 3, "rutttttttt"},
    {"three, one differs", 3, "rtttttttd"},
    {"three, one never comes", 3, "ttttttttn"},
    {"four ranks", 4, "rtttttttt"},
    {"four, two fail to open", 4, "uutttttttt"},
    {"nobody is out of time", 3},
    {"two disjoint shrinks", 2, "tttttttth"},
};

void play_at_random(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto below = [&random](int count) {
    return static_cast<int>(random() % static_cast<std::uint64_t>(count));
  };
  Setup setup = {"random", 2 + below(below(8) == 0 ? 30 : 5)};
  const bool has_stops = below(3) > 0;
  if (has_stops && below(2) == 0) setup.calls = "|";
  if (below(6) == 0) setup.with = "2ph"[below(setup.has_begun() ? 2 : 3)];
  for (int i = has_stops ? 2 + below(6) : 0; i > 0; --i) {
    setup.calls += below(8) == 0 ? "sc-c"[below(4)] : setup.is('2') && below(2) == 0 ? 'b' : 'a';
  }
  if (has_stops && below(4) == 0) {
    const int at = below(static_cast<int>(setup.calls.size()));
    setup.calls_of_last = setup.calls;
    setup.calls_of_last.insert(static_cast<std::size_t>(at), 1, "sca-"[below(4)]);
  }
  setup.first_stop = 1 + static_cast<std::uint64_t>(below(3));
  setup.span_calls = 1 + static_cast<std::uint64_t>(below(3));
  for (const char letter : std::string_view("rwwwkscccllllxaaoo")) {
    if (below(3) == 0) setup.with += letter;
  }
  for (const char letter : std::string_view(setup.has_begun() ? "f" : "dnf")) {
    if (below(8) == 0) setup.with += letter;
  }
  Explored world(setup);
  const char* wrong = nullptr;
  for (int i = 0; i < 2'000 * setup.num_ranks && wrong == nullptr; ++i) {
    const int count = world.happen(-1);
    wrong = world.wrong(count == 0);
    if (count == 0 && wrong == nullptr) return;
    if (count == 0) break;
    // Disturbances are rare, or there would be nothing to disturb.
    int chosen = below(count);
    for (int again = 0; again < 20 && chosen >= world.num_usual; ++again) chosen = below(count);
    world.happen(chosen);
  }
  ++g_failures;
  std::fprintf(stderr, "seed %" PRIu64 ": ", seed);
  tell(setup.name, wrong != nullptr ? wrong : "it never ends", world);
}

}  // namespace

int main(int argc, char** argv) {
  const bool few = std::getenv("DYNAMICCL_FEW") != nullptr;
  const std::string_view what = argc > 1 ? argv[1] : "";
  if (what == "worlds") {
    const std::string_view only = argc > 2 ? argv[2] : "";
    for (const Setup& setup : kSmall) {
      if (only.empty() || only == setup.name) CHECK(explore(setup.name, Explored(setup)));
    }
    if (!only.empty()) return g_failures != 0;
    CHECK(!explore("an arbiter inside a rank", Explored({"which is wrong", 2, "rpi"}), false));
    for (const Setup& setup : kLarge) CHECK(few || explore(setup.name, Explored(setup)));
  } else if (what == "word") {
    for (const Setup& setup : kWords) CHECK(explore(setup.name, WordWorld(setup)));
  } else {
    const char* seed = std::getenv("DYNAMICCL_SEED");
    const std::uint64_t first = seed != nullptr ? 1'000'000 * std::strtoull(seed, nullptr, 10) : 0;
    const std::uint64_t count = few ? 2'000 : 100'000;
    for (std::uint64_t i = 0; i < count && g_failures == 0; ++i) play_at_random(first + i);
    std::printf("%" PRIu64 " random schedules from seed %" PRIu64 "\n", count, first);
  }
  return g_failures != 0;
}
