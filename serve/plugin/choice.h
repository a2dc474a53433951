// Which cell of NCCL's cost table a decision means, and how many channels may go with it.
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

inline bool is_collnet(int algorithm) noexcept {
  return algorithm == kCollNetDirect || algorithm == kCollNetChain;
}

inline bool is_nvls(int algorithm) noexcept { return algorithm == kNVLS || algorithm == kNVLSTree; }

/// Whether `costs` has a shape that NCCL passes; else nothing in it is read or written.
inline bool is_sound(CostTable costs) noexcept {
  return costs.num_protocols == kNumProtocols && costs.num_algorithms >= 1 &&
         costs.num_algorithms <= kMostAlgorithms;
}

/// What is made ready for the hot path (choice_avx2.h), for cost tables of all our algorithms; null
/// on a processor without AVX2 and the bit instructions of its time.
struct Named;
const Named* find_named(int num_nodes) noexcept;

/// An entry in the hot path's form, 0 to abstain: which of Named is its own, the first of the four
/// cells that hold its algorithm's three, and its channels.
using Ready = std::uint32_t;
Ready make_ready(const Entry& entry) noexcept;

/// The channels to ask for with `algorithm`; 0 leaves them to NCCL.
int channels_for(const Entry& entry, int algorithm, int num_nodes) noexcept;

/// Set the cell that `entry` asks for to 0.0, so that NCCL's argmin is that cell, and with it the
/// channels. Returns the cell, as algorithm x num_protocols + protocol, or -1 when nothing was
/// touched. An AUTO knob takes NCCL's own cheapest among the cells that match. `costs` must be
/// sound.
int force(const Entry& entry, int num_nodes, CostTable costs, int* num_channels) noexcept;

}  // namespace dynamiccl
