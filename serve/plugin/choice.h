// Which cell of NCCL's cost table a decision means: plain scalar code, run for every collective.
#pragma once

#include "table.h"

namespace dynamiccl {

/// NCCL's cost table: flat float[num_algorithms][num_protocols], microseconds, -1.0 = unavailable.
struct CostTable {
  float* cells;
  int num_algorithms;
  int num_protocols;
};

inline constexpr int kMostAlgorithms = 16;  // NCCL has 7; anything above this is not a cost table

/// Whether `costs` has a shape that NCCL passes; else nothing in it is read or written.
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

/// Sets the cell that `entry` asks for to 0.0, so that it is the cheapest, and with it the number
/// of channels. Returns the cell, as algorithm x num_protocols + protocol, or -1 when nothing was
/// touched. An AUTO knob takes NCCL's cheapest among the cells that match. `costs` must be sound.
///
/// A cell that is free already would tie with ours, and which of the two wins depends on the
/// release (the first up to 2.30, the last from 2.31 on): then nothing is touched. NCCL takes Ring
/// out of the running where it costs 100 times as much as all else, and so do we.
inline int choose(const Entry& entry, int num_nodes, CostTable costs, int* num_channels) noexcept {
  // Without a branch that depends on a cost: NCCL's costs are nothing that could be guessed.
  constexpr float kNever = __builtin_inff();
  const int num_cells = costs.num_algorithms * kNumProtocols;
  float prices[kMostAlgorithms * kNumProtocols];
  bool has_free = false;
  for (int cell = 0; cell < num_cells; ++cell) {
    const float cost = costs.cells[cell];
    has_free |= cost == 0.0F;
    prices[cell] = cost > 0.0F ? cost : kNever;
  }
  if (has_free) return -1;
  float ring = kNever, other = kNever;
  for (int cell = 0; cell < num_cells; ++cell) {
    const bool is_ring = cell >= kRing * kNumProtocols && cell < (kRing + 1) * kNumProtocols;
    const float of_ring = is_ring ? prices[cell] : kNever;
    const float of_other = is_ring ? kNever : prices[cell];
    ring = of_ring < ring ? of_ring : ring;
    other = of_other < other ? of_other : other;
  }
  const bool leaves_ring_out = ring >= kRelegatedCostRatio * other;
  const int first = entry.algorithm == kAuto ? 0 : entry.algorithm;
  const int last = entry.algorithm == kAuto ? costs.num_algorithms - 1 : entry.algorithm;
  int chosen = -1;
  float best = kNever;
  for (int algorithm = first; algorithm <= last && last < costs.num_algorithms; ++algorithm) {
    if (leaves_ring_out && algorithm == kRing) continue;
    for (int protocol = 0; protocol < kNumProtocols; ++protocol) {
      const int cell = algorithm * kNumProtocols + protocol;
      const bool is_meant = entry.protocol == kAuto || entry.protocol == protocol;
      const float price = is_meant ? prices[cell] : kNever;
      chosen = price < best ? cell : chosen;
      best = price < best ? price : best;
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
