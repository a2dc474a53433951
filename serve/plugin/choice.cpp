// On the hot path: only computes, without a branch that costs.
#include "choice.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <cstring>

namespace dynamiccl {
namespace {

constexpr int kMostCells = kMostAlgorithms * kNumProtocols;
static_assert(kMostCells <= 64, "a bit for each cell");

/// A cost's order as an integer: the bits of floats from 0.0 up sort as the floats do, and those of
/// infinities, NaNs and negative numbers (-1.0: not available) all lie at kNoPrice and above. So
/// one comparison does for "available" and "cheaper", without a branch to mispredict.
using Price = std::uint32_t;
constexpr Price kNoPrice = 0x7f800000;  // infinity
constexpr Price kMinusZero = 0x80000000;
static_assert(kCostIgnore < 0.0F && sizeof(float) == sizeof(Price), "see above");

float cost_of(Price price) noexcept {
  float cost;
  std::memcpy(&cost, &price, sizeof cost);
  return cost;
}

using Cells = std::uint64_t;  // a bit for each
constexpr Cells kRingCells = Cells{7} << (kRing * kNumProtocols);

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
constexpr Meant kMeant;

bool is_relegated(Price ring, Price other) noexcept {
  return cost_of(ring) >= kRelegatedCostRatio * cost_of(other);
}

/// A free cell before ours would win NCCL's tie, and the channels would then be another's.
int unless_tied(int chosen, Cells free) noexcept {
  return (free & ((Cells{1} << chosen) - 1)) != 0 ? -1 : chosen;
}

/// The algorithms, a bit for each, that lower a number of channels to what the communicator has.
/// The others use it as it is, and more than there are is out of range (`src/enqueue.cc`,
/// scheduleCollTasksToPlan). An algorithm newer than we are is not risked.
constexpr unsigned kClampOneNode =
    1U << kTree | 1U << kRing | 1U << kNVLS | 1U << kNVLSTree | 1U << kPAT;
constexpr unsigned kClampNodes = kClampOneNode & ~(1U << kNVLS | 1U << kNVLSTree);

bool clamps(int algorithm, int num_nodes) noexcept {
  return ((num_nodes > 1 ? kClampNodes : kClampOneNode) >> algorithm & 1) != 0;
}

/// Write a choice, or nothing for -1. The cell is of an algorithm that we know. Masks, since the
/// compiler would turn a conditional into a branch, and that into a guess that is often wrong.
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
  const int channels = entry.num_channels & chosen & clamped;
  *num_channels = pick(-channels >> 31, channels, *num_channels);
  return cell;
}

/// Any number of cells, one after the other.
int choose_scalar(const float* costs, int num_cells, Cells meant) noexcept {
  Price prices[kMostCells];
  Price ring = kNoPrice, other = kNoPrice;
  Cells free = 0;
  for (int cell = 0; cell < num_cells; ++cell) {
    Price bits;
    std::memcpy(&bits, &costs[cell], sizeof bits);
    prices[cell] = bits == kMinusZero ? 0 : bits;
    Price& cheapest = cell / kNumProtocols == kRing ? ring : other;
    cheapest = std::min(cheapest, prices[cell]);
    free |= Cells{prices[cell] == 0} << cell;
  }
  if (is_relegated(ring, other)) meant &= ~kRingCells;
  int chosen = -1;
  Price price = kNoPrice;
  for (int cell = 0; cell < num_cells; ++cell) {
    const bool is_better = (meant >> cell & 1) != 0 && prices[cell] < price;
    chosen = is_better ? cell : chosen;
    price = is_better ? prices[cell] : price;
  }
  return chosen < 0 ? -1 : unless_tied(chosen, free);
}

#if defined(__x86_64__)

constexpr int kLanes = 8;
constexpr int kVectors = 3;

/// The first cell of a vector: the last one overlaps the one before rather than reach beyond the
/// end.
constexpr int first_of(int vector, int num_cells) noexcept {
  return vector + 1 < kVectors ? vector * kLanes : num_cells - kLanes;
}

/// Ones in the lanes of cells that are not among some: what is or-ed with them has no price.
struct alignas(32) Barred {
  Price lanes[kVectors][kLanes] = {};
  constexpr Barred() = default;
  constexpr Barred(Cells cells, int num_cells) {
    for (int v = 0; v < kVectors; ++v) {
      for (int i = 0; i < kLanes; ++i) {
        lanes[v][i] = (cells >> (first_of(v, num_cells) + i) & 1) != 0 ? 0 : ~Price{0};
      }
    }
  }
};

template <int num_cells>
struct BarredBy {
  Barred entries[kNumAlgorithms + 1][kNumProtocols + 1];
  Barred ring = Barred(kRingCells, num_cells);
  Barred other = Barred(~kRingCells, num_cells);
  constexpr BarredBy() {
    for (int a = 0; a <= kNumAlgorithms; ++a) {
      for (int p = 0; p <= kNumProtocols; ++p) {
        entries[a][p] = Barred(kMeant.cells[a][p], num_cells);
      }
    }
  }
};
template <int num_cells>
constexpr BarredBy<num_cells> kBarred;

/// The same as choose_scalar for one number of cells, three vectors at a time. Which cell it will
/// be is anyone's guess, the processor's too: so without a branch, but for what hardly ever is.
template <int num_cells>
__attribute__((target("avx2"), always_inline)) inline int choose_avx2(const float* costs,
                                                                      int algorithm,
                                                                      int protocol) noexcept {
  const auto load = [costs](int v) __attribute__((target("avx2"), always_inline)) {
    const __m256i bits =
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(costs + first_of(v, num_cells)));
    const __m256i is_minus_zero =
        _mm256_cmpeq_epi32(bits, _mm256_set1_epi32(static_cast<int>(kMinusZero)));
    return _mm256_andnot_si256(is_minus_zero, bits);
  };
  const __m256i prices[kVectors] = {load(0), load(1), load(2)};
  const auto among = [&prices](const Barred& barred,
                               int v) __attribute__((target("avx2"), always_inline)) {
    return _mm256_or_si256(prices[v],
                           _mm256_load_si256(reinterpret_cast<const __m256i*>(barred.lanes[v])));
  };
  const auto halved = [](__m256i all) __attribute__((target("avx2"), always_inline)) {
    return _mm_min_epu32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
  };
  const auto narrowed = [halved](__m256i a, __m256i b, __m256i c)
                            __attribute__((target("avx2"), always_inline)) {
                              return halved(_mm256_min_epu32(_mm256_min_epu32(a, b), c));
                            };
  const BarredBy<num_cells>& barred = kBarred<num_cells>;
  const Barred& entry = barred.entries[algorithm + 1][protocol + 1];
  const __m256i meant[kVectors] = {among(entry, 0), among(entry, 1), among(entry, 2)};

  // The least of those meant, of all but Ring's, and of Ring's: lanes 0, 1 and 2, found together.
  const __m128i mine = narrowed(meant[0], meant[1], meant[2]);
  const __m128i other =
      narrowed(among(barred.other, 0), among(barred.other, 1), among(barred.other, 2));
  static_assert(kRing * kNumProtocols + kNumProtocols <= kLanes, "Ring is in the first vector");
  const __m128i ring = halved(among(barred.ring, 0));
  const __m128i two =
      _mm_min_epu32(_mm_unpacklo_epi32(mine, other), _mm_unpackhi_epi32(mine, other));
  const __m128i one = _mm_min_epu32(_mm_unpacklo_epi32(ring, ring), _mm_unpackhi_epi32(ring, ring));
  __m128i least = _mm_min_epu32(_mm_unpacklo_epi64(two, one), _mm_unpackhi_epi64(two, one));
  least = _mm_min_epu32(least, _mm_set1_epi32(static_cast<int>(kNoPrice)));
  const auto price = static_cast<Price>(_mm_cvtsi128_si32(least));
  const auto other_price = static_cast<Price>(_mm_extract_epi32(least, 1));
  const auto ring_price = static_cast<Price>(_mm_extract_epi32(least, 2));

  const __m256i wanted = _mm256_broadcastd_epi32(least);
  Cells cells = Cells{1} << num_cells;  // where nothing is meant that has a price
  for (int v = 0; v < kVectors; ++v) {
    const __m256i equal = _mm256_cmpeq_epi32(meant[v], wanted);
    const auto bits = static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(equal)));
    cells |= Cells{bits} << first_of(v, num_cells);
  }
  const int chosen = __builtin_ctzll(cells);
  const bool is_ring = static_cast<unsigned>(chosen - kRing * kNumProtocols) < kNumProtocols;
  const bool has_free = std::min(other_price, ring_price) == 0;
  if (__builtin_expect(has_free | (is_ring & is_relegated(ring_price, other_price)), 0)) {
    return choose_scalar(costs, num_cells, kMeant.cells[algorithm + 1][protocol + 1]);
  }
  return chosen | -static_cast<int>(price >= kNoPrice);
}

template <int num_cells>
__attribute__((target("avx2"))) int force_avx2(const Entry& entry, int num_nodes, float* cells,
                                               int* num_channels) noexcept {
  const int cell = choose_avx2<num_cells>(cells, entry.algorithm, entry.protocol);
  return take(cell, entry, num_nodes, cells, num_channels);
}

bool g_has_avx2 = false;

__attribute__((constructor)) void look_at_processor() {
  __builtin_cpu_init();
  g_has_avx2 = __builtin_cpu_supports("avx2") != 0;
}

#endif

}  // namespace

int channels_for(const Entry& entry, int algorithm, int num_nodes) noexcept {
  return algorithm < kNumAlgorithms && clamps(algorithm, num_nodes) ? entry.num_channels : 0;
}

int force(const Entry& entry, int num_nodes, const CostTable& costs, int* num_channels) noexcept {
  if (entry.algorithm >= costs.num_algorithms) return -1;
#if defined(__x86_64__)
  if (g_has_avx2 && costs.num_algorithms == 7) {
    return force_avx2<21>(entry, num_nodes, costs.cells, num_channels);
  }
  if (g_has_avx2 && costs.num_algorithms == 6) {
    return force_avx2<18>(entry, num_nodes, costs.cells, num_channels);
  }
#endif
  const int cell = choose_scalar(costs.cells, costs.num_algorithms * kNumProtocols,
                                 kMeant.cells[entry.algorithm + 1][entry.protocol + 1]);
  if (cell / kNumProtocols < kNumAlgorithms) {
    return take(cell, entry, num_nodes, costs.cells, num_channels);
  }
  costs.cells[cell] = 0.0F;
  return cell;
}

}  // namespace dynamiccl
