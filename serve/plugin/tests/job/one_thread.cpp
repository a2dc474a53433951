// All ranks of a communicator in one process, whose one thread calls them in turn, as with
// ncclCommInitAll; or as two processes' halves would be. A call that waited for another rank's
// would wait in vain.
//
//   one_thread PLUGIN.so RANKS CALLS     prints one JSON document
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

#include "tests/job/fake_nccl.h"

namespace {

class Counts final : public Witness {
 public:
  void log(int, const std::string& line) override { std::fprintf(stderr, "%s\n", line.c_str()); }
  void violation(const std::string& what) override {
    std::fprintf(stderr, "%s\n", what.c_str());
    ++violations;
  }
  void asked(std::uint64_t) override {}
  void created(std::uint64_t) override {}

  std::atomic<int> violations{0};
};

}  // namespace

int main(int, char** arguments) {
  const int num_ranks = std::atoi(arguments[2]);
  adopt_thread();
  Counts counts;
  set_witness(&counts);
  ProcessOptions options;
  options.tuner_path = arguments[1];
  options.profiler_path = arguments[1];
  Process process(release_named("2.30"), options, counts);
  std::vector<std::unique_ptr<Communicator>> ranks(static_cast<std::size_t>(num_ranks));
  std::vector<std::thread> threads;  // NCCL's, one for each `init` of a group
  for (int rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([&, rank] {
      adopt_thread();
      ranks[static_cast<std::size_t>(rank)] = std::make_unique<Communicator>(
          process, CommunicatorOptions{0x1234567890abcdef, rank, num_ranks, 1});
    });
  }
  for (std::thread& thread : threads) thread.join();
  int acted = 0, differ = 0;
  for (int call = 0; call < std::atoi(arguments[3]); ++call) {
    Outcome first = {};
    for (const auto& rank : ranks) {
      const Outcome outcome = rank->run({{dynamiccl::kAllReduce, 1 << 20, Datatype::f32}}).front();
      if (rank == ranks.front()) first = outcome;
      acted += outcome.acted;
      differ += outcome.algorithm != first.algorithm || outcome.protocol != first.protocol ||
                outcome.num_channels != first.num_channels;
    }
  }
  for (const auto& rank : ranks) rank->destroy();
  std::printf("{\"acted\": %d, \"differ\": %d, \"violations\": %d}\n", acted, differ,
              counts.violations.load());
  return 0;
}
