// What the arbiter's worker looks at for one communicator does not grow with those that a job has
// made before. Counted, not timed: all of it is compiled to tell of each basic block.
#include <cstdint>

#include "agree/rounds.h"
#include "tests/check.h"

using namespace dynamiccl;

namespace {

std::uint64_t g_blocks = 0;

struct Worker final : Outlet {
  bool log(const Logged&) override { return true; }
  void send(Connection, const Reply&) override {}
  const char* propose(const Vote&, Reply*) override { return nullptr; }
  std::uint64_t draw() override { return 7; }
  void decided(const RoundKey&, bool) override {}

  /// `init` and a stop of two ranks, one of which is lost in the stop of every other communicator.
  /// Returns the basic blocks.
  std::uint64_t make_communicator() {
    const std::uint64_t before = g_blocks;
    Vote vote;
    vote.num_ranks = 2;
    vote.round.comm = ++num_made * 0x9e3779b97f4a7c15U;
    for (vote.round.number = 0; vote.round.number < 2; ++vote.round.number) {
      for (const VoteKind kind : {VoteKind::kVote, VoteKind::kConfirm}) {
        for (vote.nonce = 1; vote.nonce <= 2; ++vote.nonce) {
          const Connection connection = 4 * num_made + 2 * vote.round.number + vote.nonce;
          vote.kind = kind;
          vote.question = kind == VoteKind::kVote ? 0 : draw();
          rounds.hear(connection, vote, 0, this);
          rounds.look_at_clock(0, this);
          const bool is_lost = vote.round.number == 1 && num_made % 2 == 0;
          if (is_lost || kind == VoteKind::kConfirm) rounds.gone(connection, this);
        }
      }
    }
    return g_blocks - before;
  }

  Rounds rounds{0, Limits()};
  std::uint64_t num_made = 0;
};

}  // namespace

/// -fsanitize-coverage=trace-pc calls it at each basic block.
extern "C" __attribute__((no_sanitize_coverage)) void __sanitizer_cov_trace_pc() { ++g_blocks; }

int main() {
  Worker worker;
  std::uint64_t few = 0;
  for (const std::uint64_t num_communicators : {1'000U, 8'000U, 65'537U}) {
    while (worker.num_made < num_communicators) worker.make_communicator();
    const std::uint64_t blocks = worker.make_communicator() + worker.make_communicator();
    if (few == 0) few = blocks;
    std::printf("%zu communicators: %zu basic blocks for two more\n",
                static_cast<std::size_t>(num_communicators), static_cast<std::size_t>(blocks));
    CHECK(blocks > 100 && blocks < 2 * few);
    if (g_failures != 0) break;  // what is linear takes long
  }
  return g_failures != 0;
}
