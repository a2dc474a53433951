// The thin tuner's choice is the one that the AVX2 paths make, on any cost table that NCCL may
// pass.
#include <cstring>
#include <random>

#include "choice.h"
#include "tests/check.h"
#include "tuner/choice.h"

int main() {
  using namespace dynamiccl;
  std::mt19937_64 random(1);
  const auto below = [&random](int count) {
    return static_cast<int>(random() % static_cast<std::uint64_t>(count));
  };
  int touched = 0;
  for (int i = 0; i < 1'000'000; ++i) {
    const int num_algorithms = 1 + below(kNumAlgorithms);
    const int num_nodes = 1 + below(2);
    float costs[kNumAlgorithms * kNumProtocols], other[kNumAlgorithms * kNumProtocols];
    for (float& cost : costs) {
      const int kind = below(8);
      cost = kind < 3 ? kCostIgnore : kind == 3 ? 1e4F : 1.0F + static_cast<float>(below(20));
    }
    // Free cells: only some tables have any. There the old rule takes a cell before them.
    std::memcpy(other, costs, sizeof costs);
    const Entry entry = {static_cast<std::int8_t>(below(kNumAlgorithms + 1) - 1),
                         static_cast<std::int8_t>(below(kNumProtocols + 1) - 1),
                         static_cast<std::int8_t>(below(33)), 1, 0};
    int ours = 0, theirs = 0;
    choose(entry, num_nodes, costs, num_algorithms, &ours);
    const int cell = force(entry, num_nodes, {other, num_algorithms, kNumProtocols}, &theirs);
    CHECK(std::memcmp(costs, other, sizeof costs) == 0);
    CHECK(ours == theirs);
    touched += cell >= 0;
    if (g_failures > 0) break;
  }
  CHECK(touched > 100'000);
  float costs[] = {3.0F, 0.0F, 2.0F, 1.0F, 1.0F, 1.0F};
  int channels = 0;
  choose({kTree, kLL, 4, 1, 0}, 1, costs, 2, &channels);
  CHECK(costs[0] == 3.0F && channels == 0);  // a free cell would tie
  return g_failures;
}
