// Chooses the cell of NCCL's cost table for a decision: scalar code that runs for every collective.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "table.h"

namespace dynamiccl {

/// NCCL's cost table: flat float[num_algorithms][num_protocols], microseconds, -1.0 = unavailable.
struct CostTable {
  float* cells;
  int num_algorithms;
  int num_protocols;
};

inline constexpr int kMostAlgorithms = 16;  // NCCL has 7, RCCL 8

/// Whether `costs` has a shape of a cost table; otherwise it is neither read nor written.
inline bool is_sound(CostTable costs) noexcept {
  return costs.num_protocols == kNumProtocols && costs.num_algorithms >= 1 &&
         costs.num_algorithms <= kMostAlgorithms;
}

/// Algorithms that lower a number of channels to what the communicator has; the others use it as it
/// is, and more than there are is out of range (2.30.7 `src/enqueue.cc`, scheduleCollTasksToPlan).
inline bool clamps_channels(int algorithm, int num_nodes) noexcept {
  if (algorithm == kNVLS || algorithm == kNVLSTree) return num_nodes == 1;
  return algorithm == kTree || algorithm == kRing || algorithm == kPAT;
}

/// A cost as an integer, compared without a branch: those above zero keep their order, 0.0 (and
/// -0.0, by the sum) is 0, and what is not available (negative) or no number is above infinity.
inline std::uint32_t order_of(float cost) noexcept {
  const float positive_zero = cost + 0.0F;
  std::uint32_t order = 0;
  std::memcpy(&order, &positive_zero, sizeof order);
  return order;
}

inline float cost_of(std::uint32_t order) noexcept {
  float cost = 0;
  std::memcpy(&cost, &order, sizeof cost);
  return cost;
}

/// Sets the cell that `entry` asks for to 0.0, so that it is the cheapest, and with it the number
/// of channels. Returns the cell's index, or -1 when nothing was touched. An AUTO knob takes NCCL's
/// cheapest among the cells that match. `costs` must be sound.
///
/// A cell that is free already would tie with ours, and which of the two wins depends on the
/// release (the first up to 2.30, the last from 2.31 on): then nothing is touched. NCCL takes Ring
/// out of the running where it costs 100 times as much as all else, and so do we.
inline int choose(const Entry& entry, int num_nodes, CostTable costs, int* num_channels) noexcept {
  constexpr std::uint32_t kNever = 0x7f800000;  // order_of(infinity)
  const int num_cells = costs.num_algorithms * kNumProtocols;
  const auto least = [&costs](int from, int to) {
    std::uint32_t lowest = kNever;
    for (int cell = from; cell < to; ++cell) lowest = std::min(lowest, order_of(costs.cells[cell]));
    return lowest;
  };
  constexpr int kFirstOfRing = kRing * kNumProtocols, kAfterRing = kFirstOfRing + kNumProtocols;
  const std::uint32_t ring = least(kFirstOfRing, std::min(kAfterRing, num_cells));
  const std::uint32_t other = std::min(least(0, kFirstOfRing), least(kAfterRing, num_cells));
  if (ring == 0 || other == 0) return -1;
  const bool leaves_ring_out = cost_of(ring) >= kRelegatedCostRatio * cost_of(other);
  const int first = entry.algorithm == kAuto ? 0 : entry.algorithm;
  const int last = entry.algorithm == kAuto ? costs.num_algorithms - 1 : entry.algorithm;
  int chosen = -1;
  std::uint32_t best = kNever;
  for (int algorithm = first; algorithm <= last && last < costs.num_algorithms; ++algorithm) {
    if (leaves_ring_out && algorithm == kRing) continue;
    for (int protocol = 0; protocol < kNumProtocols; ++protocol) {
      const int cell = algorithm * kNumProtocols + protocol;
      const bool is_meant = entry.protocol == kAuto || entry.protocol == protocol;
      const std::uint32_t order = is_meant ? order_of(costs.cells[cell]) : kNever;
      chosen = order < best ? cell : chosen;
      best = order < best ? order : best;
    }
  }
  if (chosen < 0) return -1;
  costs.cells[chosen] = 0.0F;
  if (entry.num_channels != 0 && clamps_channels(chosen / kNumProtocols, num_nodes)) {
    *num_channels = entry.num_channels;
  }
  return chosen;
}

}  // namespace dynamiccl
