// The cells of a cost table as integers and as bits, for choice.cpp and choice_avx2.h.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "choice.h"

namespace dynamiccl {

inline constexpr int kMostCells = kMostAlgorithms * kNumProtocols;
static_assert(kMostCells <= 64, "a bit for each cell");

/// A cost's order as an integer: the bits of floats from 0.0 up sort as the floats do, and those of
/// infinities, NaNs and negative numbers (-1.0: not available) all lie at kNoPrice and above. So
/// one comparison does for "available" and "cheaper", without a branch to mispredict.
using Price = std::uint32_t;
inline constexpr Price kNoPrice = 0x7f800000;  // infinity
inline constexpr Price kMinusZero = 0x80000000;
static_assert(kCostIgnore < 0.0F && sizeof(float) == sizeof(Price), "see above");

inline float cost_of(Price price) noexcept {
  float cost;
  std::memcpy(&cost, &price, sizeof cost);
  return cost;
}

using Cells = std::uint64_t;  // a bit for each
inline constexpr Cells kRingCells = Cells{7} << (kRing * kNumProtocols);

/// The cells that an entry may mean: [algorithm + 1][protocol + 1], AUTO first.
struct Meant {
  Cells cells[kNumAlgorithms + 1][kNumProtocols + 1] = {};
  constexpr Meant() {
    for (int a = kAuto; a < kNumAlgorithms; ++a) {
      for (int p = kAuto; p < kNumProtocols; ++p) {
        for (int cell = 0; cell < kMostCells; ++cell) {
          const bool is_meant = (a == kAuto || cell / kNumProtocols == a) &&
                                (p == kAuto || cell % kNumProtocols == p);
          if (is_meant) cells[a + 1][p + 1] |= Cells{1} << cell;
        }
      }
    }
  }
};
inline constexpr Meant kMeant;

inline bool is_relegated(Price ring, Price other) noexcept {
  return cost_of(ring) >= kRelegatedCostRatio * cost_of(other);
}

/// The algorithms, a bit for each, that lower a number of channels to what the communicator has.
/// The others use it as it is, and more than there are is out of range (`src/enqueue.cc`,
/// scheduleCollTasksToPlan). An algorithm newer than we are is not risked.
inline constexpr unsigned kClampOneNode =
    1U << kTree | 1U << kRing | 1U << kNVLS | 1U << kNVLSTree | 1U << kPAT;
inline constexpr unsigned kClampNodes = kClampOneNode & ~(1U << kNVLS | 1U << kNVLSTree);

inline bool clamps(int algorithm, int num_nodes) noexcept {
  return ((num_nodes > 1 ? kClampNodes : kClampOneNode) >> algorithm & 1) != 0;
}

/// Ask for so many channels; 0 leaves what there is. A mask, since the compiler would turn a
/// conditional into a branch, and that into a guess that is often wrong.
inline void ask_for(int channels, int* num_channels) noexcept {
  const int is_set = -channels >> 31;
  *num_channels = (channels & is_set) | (*num_channels & ~is_set);
}

/// Write a choice, or nothing for -1. The cell is of an algorithm that we know. Masks again.
inline int take(int cell, const Entry& entry, int num_nodes, float* cells,
                int* num_channels) noexcept {
  const auto pick = [](auto mask, auto yes, auto no) { return (yes & mask) | (no & ~mask); };
  float nowhere;
  const int chosen = ~(cell >> 31);  // all ones, or none
  const auto to = pick(static_cast<std::uintptr_t>(std::intptr_t{chosen}),
                       reinterpret_cast<std::uintptr_t>(cells + (cell & chosen)),
                       reinterpret_cast<std::uintptr_t>(&nowhere));
  *reinterpret_cast<float*>(to) = 0.0F;
  const int clamped = -static_cast<int>(clamps((cell & chosen) / kNumProtocols, num_nodes));
  ask_for(entry.num_channels & chosen & clamped, num_channels);
  return cell;
}

/// The cell for any number of cells, one after the other; -1 for none.
int choose_scalar(const float* costs, int num_cells, Cells meant) noexcept;

}  // namespace dynamiccl
