// Which cell of NCCL's cost table a decision means: plain scalar code, run for every collective.
#pragma once

#include "table.h"

namespace dynamiccl {

/// Algorithms that lower a number of channels to what the communicator has; the others use it as it
/// is, and more than there are is out of range (2.30.7 `src/enqueue.cc`, scheduleCollTasksToPlan).
inline bool clamps_channels(int algorithm, int num_nodes) noexcept {
  if (algorithm == kNVLS || algorithm == kNVLSTree) return num_nodes == 1;
  return algorithm == kTree || algorithm == kRing || algorithm == kPAT;
}

/// Sets the cell that `entry` asks for to 0.0, so that it is the cheapest, and with it the number
/// of channels; or touches nothing. `costs` is NCCL's flat float[num_algorithms][3], in us,
/// negative where a cell is not available. An AUTO knob takes NCCL's cheapest among the cells that
/// match.
///
/// A cell that is free already would tie with ours, and which of the two wins depends on the
/// release (the first up to 2.30, the last from 2.31 on): then nothing is touched. NCCL takes Ring
/// out of the running where it costs 100 times as much as all else, and so do we.
inline void choose(const Entry& entry, int num_nodes, float* costs, int num_algorithms,
                   int* num_channels) noexcept {
  const int num_cells = num_algorithms * kNumProtocols;
  float ring = 1e30F, other = 1e30F;
  for (int cell = 0; cell < num_cells; ++cell) {
    const float cost = costs[cell];
    if (cost == 0.0F) return;
    float* cheapest = cell / kNumProtocols == kRing ? &ring : &other;
    if (cost > 0.0F && cost < *cheapest) *cheapest = cost;
  }
  const bool leaves_ring_out = ring >= kRelegatedCostRatio * other;
  int chosen = -1;
  for (int cell = 0; cell < num_cells; ++cell) {
    const int algorithm = cell / kNumProtocols, protocol = cell % kNumProtocols;
    if (entry.algorithm != kAuto && entry.algorithm != algorithm) continue;
    if (entry.protocol != kAuto && entry.protocol != protocol) continue;
    if (leaves_ring_out && algorithm == kRing) continue;
    if (costs[cell] > 0.0F && costs[cell] < 1e30F && (chosen < 0 || costs[cell] < costs[chosen])) {
      chosen = cell;
    }
  }
  if (chosen < 0) return;
  costs[chosen] = 0.0F;
  if (entry.num_channels != 0 && clamps_channels(chosen / kNumProtocols, num_nodes)) {
    *num_channels = entry.num_channels;
  }
}

}  // namespace dynamiccl
