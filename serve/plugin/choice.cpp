// On the hot path: only computes, without a branch that costs.
#include "choice.h"

#include <algorithm>
#include <cstring>

namespace dynamiccl {
namespace {

constexpr int kMostAlgorithms = 16;  // NCCL has 7; anything above this is not a cost table

/// The knob's values to try: all `count` of them, or one.
struct Range {
  int first;
  int last;
};

Range range_of(int knob, int count) noexcept {
  return knob == kAuto ? Range{0, count - 1} : Range{knob, knob};
}

/// A cost's order as an integer: the bits of floats from 0.0 up sort as the floats do, and those of
/// infinities, NaNs and negative numbers (-1.0: not available) all lie at kNoPrice and above. So
/// one comparison does for "available" and "cheaper", without a branch to mispredict.
using Price = std::uint32_t;
constexpr Price kNoPrice = 0x7f800000;  // infinity
static_assert(kCostIgnore < 0.0F && sizeof(float) == sizeof(Price), "see above");

Price price_of(float cost) noexcept {
  Price bits;
  std::memcpy(&bits, &cost, sizeof bits);
  return bits == 0x80000000 ? 0 : bits;  // -0.0
}

float cost_of(Price price) noexcept {
  float cost;
  std::memcpy(&cost, &price, sizeof cost);
  return cost;
}

}  // namespace

bool is_sound(const CostTable& costs) noexcept {
  return costs.num_protocols == kNumProtocols && costs.num_algorithms >= 1 &&
         costs.num_algorithms <= kMostAlgorithms;
}

int choose_cell(const Entry& entry, const CostTable& costs) noexcept {
  if (entry.algorithm >= costs.num_algorithms) return -1;
  Price prices[kMostAlgorithms * kNumProtocols];
  Price cheapest_ring = kNoPrice, cheapest_other = kNoPrice;
  for (int a = 0; a < costs.num_algorithms; ++a) {
    Price& cheapest = a == kRing ? cheapest_ring : cheapest_other;
    for (int cell = a * kNumProtocols; cell < (a + 1) * kNumProtocols; ++cell) {
      prices[cell] = price_of(costs.cells[cell]);
      cheapest = std::min(cheapest, prices[cell]);
    }
  }
  const bool ring_is_relegated =
      cost_of(cheapest_ring) >= kRelegatedCostRatio * cost_of(cheapest_other);

  const Range algorithms = range_of(entry.algorithm, costs.num_algorithms);
  const Range protocols = range_of(entry.protocol, kNumProtocols);
  int chosen = -1;
  Price price = kNoPrice;
  for (int a = algorithms.first; a <= algorithms.last; ++a) {
    if (a == kRing && ring_is_relegated) continue;
    for (int p = protocols.first; p <= protocols.last; ++p) {
      const int cell = a * kNumProtocols + p;
      if (prices[cell] < price) {
        chosen = cell;
        price = prices[cell];
      }
    }
  }
  // A free cell before ours would win NCCL's tie, and the channels would then be another's.
  bool loses_the_tie = false;
  for (int cell = 0; cell < chosen; ++cell) loses_the_tie |= prices[cell] == 0;
  return loses_the_tie ? -1 : chosen;
}

int channels_for(const Entry& entry, int algorithm, int num_nodes) noexcept {
  // These use the number unclamped, and more than the communicator has is out of range
  // (`src/enqueue.cc`, scheduleCollTasksToPlan). An algorithm newer than we are is not risked.
  const bool unclamped =
      is_collnet(algorithm) || algorithm >= kNumAlgorithms || (is_nvls(algorithm) && num_nodes > 1);
  return unclamped ? 0 : entry.num_channels;
}

int force(const Entry& entry, int num_nodes, const CostTable& costs, int* num_channels) noexcept {
  const int cell = choose_cell(entry, costs);
  if (cell < 0) return -1;
  costs.cells[cell] = 0.0F;
  const int channels = channels_for(entry, cell / kNumProtocols, num_nodes);
  if (channels > 0) *num_channels = channels;
  return cell;
}

}  // namespace dynamiccl
