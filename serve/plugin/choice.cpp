// On the hot path: only computes, without a branch that costs.
#include "choice.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <cstring>

namespace dynamiccl {
namespace {

constexpr int kMostAlgorithms = 16;  // NCCL has 7; anything above this is not a cost table
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
  Barred ring = Barred(~kRingCells, num_cells);
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

/// The same as choose_scalar for one number of cells, three vectors at a time.
template <int num_cells>
__attribute__((target("avx2"))) int choose_avx2(const float* costs, int algorithm,
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
  const auto least = [](__m256i a, __m256i b,
                        __m256i c) __attribute__((target("avx2"), always_inline)) {
    const __m256i all = _mm256_min_epu32(_mm256_min_epu32(a, b), c);
    __m128i half = _mm_min_epu32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
    half = _mm_min_epu32(half, _mm_shuffle_epi32(half, _MM_SHUFFLE(1, 0, 3, 2)));
    half = _mm_min_epu32(half, _mm_shuffle_epi32(half, _MM_SHUFFLE(2, 3, 0, 1)));
    return static_cast<Price>(_mm_cvtsi128_si32(half));
  };
  const auto where = [](const __m256i(&vectors)[kVectors],
                        Price price) __attribute__((target("avx2"), always_inline)) {
    const __m256i wanted = _mm256_set1_epi32(static_cast<int>(price));
    Cells cells = 0;
    for (int v = 0; v < kVectors; ++v) {
      const __m256i equal = _mm256_cmpeq_epi32(vectors[v], wanted);
      const auto bits = static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(equal)));
      cells |= Cells{bits} << first_of(v, num_cells);
    }
    return cells;
  };
  const BarredBy<num_cells>& barred = kBarred<num_cells>;
  const Barred& entry = barred.entries[algorithm + 1][protocol + 1];
  const __m256i meant[kVectors] = {among(entry, 0), among(entry, 1), among(entry, 2)};
  const Price price = least(meant[0], meant[1], meant[2]);
  if (price >= kNoPrice) return -1;
  const int chosen = __builtin_ctzll(where(meant, price));
  const Cells free = where(prices, 0);
  if (chosen / kNumProtocols == kRing) {
    Price ring = kNoPrice;
    for (int p = 0; p < kNumProtocols; ++p) {
      Price bits;
      std::memcpy(&bits, &costs[kRing * kNumProtocols + p], sizeof bits);
      ring = std::min(ring, bits == kMinusZero ? 0 : bits);
    }
    const Price other = least(among(barred.ring, 0), among(barred.ring, 1), among(barred.ring, 2));
    if (is_relegated(ring, std::min(other, kNoPrice))) {
      return choose_scalar(costs, num_cells, kMeant.cells[algorithm + 1][protocol + 1]);
    }
  }
  return unless_tied(chosen, free);
}

bool g_has_avx2 = false;

__attribute__((constructor)) void look_at_processor() {
  __builtin_cpu_init();
  g_has_avx2 = __builtin_cpu_supports("avx2") != 0;
}

#endif

}  // namespace

bool is_sound(const CostTable& costs) noexcept {
  return costs.num_protocols == kNumProtocols && costs.num_algorithms >= 1 &&
         costs.num_algorithms <= kMostAlgorithms;
}

int choose_cell(const Entry& entry, const CostTable& costs) noexcept {
  if (entry.algorithm >= costs.num_algorithms) return -1;
#if defined(__x86_64__)
  if (g_has_avx2 && costs.num_algorithms == 7) {
    return choose_avx2<21>(costs.cells, entry.algorithm, entry.protocol);
  }
  if (g_has_avx2 && costs.num_algorithms == 6) {
    return choose_avx2<18>(costs.cells, entry.algorithm, entry.protocol);
  }
#endif
  return choose_scalar(costs.cells, costs.num_algorithms * kNumProtocols,
                       kMeant.cells[entry.algorithm + 1][entry.protocol + 1]);
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
