// The choice of choice.h with AVX2, for cost tables of the shapes that NCCL has.
#pragma once

#if defined(__x86_64__)

#include <immintrin.h>

#include "choice_cells.h"

namespace dynamiccl {

inline constexpr int kLanes = 8;
inline constexpr int kVectors = 3;

/// The first cell of a vector: the last one overlaps the one before rather than reach beyond the
/// end.
inline constexpr int first_of(int vector, int num_cells) noexcept {
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
inline constexpr BarredBy<num_cells> kBarred;

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
__attribute__((target("avx2"), noinline)) int force_any(const Entry& entry, int num_nodes,
                                                        float* cells, int* num_channels) noexcept {
  const int cell = choose_avx2<num_cells>(cells, entry.algorithm, entry.protocol);
  return take(cell, entry, num_nodes, cells, num_channels);
}

/// What an entry that names its algorithm means: of the four cells that hold the algorithm's three,
/// ones for those that are not meant; and the bits of a number of channels that are kept.
struct alignas(32) Named {
  static constexpr int kCells = 4;
  Price not_meant[kCells] = {};
  std::int32_t kept_channels = 0;
};

/// By index_of(), which is never 0. Those of entries that name no algorithm are not looked at.
struct NamedBy {
  static constexpr int kNumCells = kNumAlgorithms * kNumProtocols;
  static constexpr int kOfAlgorithm = kNumProtocols + 1;
  static constexpr int first_of(int algorithm) noexcept {
    return std::clamp(algorithm * kNumProtocols, 0, kNumCells - Named::kCells);
  }
  static constexpr int index_of(int algorithm, int protocol) noexcept {
    return (algorithm + 1) * kOfAlgorithm + protocol + 2;
  }
  Named entries[(kNumAlgorithms + 1) * kOfAlgorithm + 1];
  constexpr explicit NamedBy(unsigned clamping) {
    for (int a = 0; a < kNumAlgorithms; ++a) {
      for (int p = kAuto; p < kNumProtocols; ++p) {
        Named& named = entries[index_of(a, p)];
        named.kept_channels = (clamping >> a & 1) != 0 ? ~0 : 0;
        for (int i = 0; i < Named::kCells; ++i) {
          const bool is_meant = (kMeant.cells[a + 1][p + 1] >> (first_of(a) + i) & 1) != 0;
          named.not_meant[i] = is_meant ? 0 : ~Price{0};
        }
      }
    }
  }
};
/// On one node, and on several.
inline constexpr NamedBy kNamed[2] = {NamedBy(kClampOneNode), NamedBy(kClampNodes)};

/// Whether it names no algorithm: it leaves that open, or abstains.
inline bool is_open(Ready ready) noexcept { return ready >> 16 <= NamedBy::kOfAlgorithm; }

/// What it was made of, if it is not 0; but for the chunks.
inline Entry entry_of(Ready ready) noexcept {
  const auto index = static_cast<int>(ready >> 16) - 1;
  return {static_cast<std::int8_t>(index / NamedBy::kOfAlgorithm - 1),
          static_cast<std::int8_t>(index % NamedBy::kOfAlgorithm - 1),
          static_cast<std::int8_t>(ready & 0xff), 1, 0};
}

/// Ones in the lane of the lowest bit of a number.
struct Lowest {
  alignas(16) Price lanes[1 << Named::kCells][Named::kCells] = {};
  constexpr Lowest() {
    for (unsigned bits = 1; bits < 1U << Named::kCells; ++bits) {
      unsigned lane = 0;
      while ((bits >> lane & 1) == 0) ++lane;
      lanes[bits][lane] = ~Price{0};
    }
  }
};
inline constexpr Lowest kLowest;

inline constexpr int kUnsure = -2;

/// The same for a cost table of all our algorithms and an entry that names one, as nearly all do:
/// the cheapest of its cells, if no cell at all is so cheap that Ring could be relegated for it, or
/// a tie lost to it. Else kUnsure, and nothing is written. `ready` is neither 0 nor open.
__attribute__((target("avx2"), always_inline)) inline int force_ready(Ready ready, const Named* by,
                                                                      float* cells,
                                                                      int* num_channels) noexcept {
  const Named& named = by[ready >> 16];
  float* const own = cells + (ready >> 8 & 0xff);
  // What is added makes 0.0 of -0.0.
  const __m128 before = _mm_loadu_ps(own);
  const __m128i prices =
      _mm_or_si128(_mm_castps_si128(_mm_add_ps(before, _mm_setzero_ps())),
                   _mm_load_si128(reinterpret_cast<const __m128i*>(named.not_meant)));
  __m128i least = _mm_min_epu32(prices, _mm_shuffle_epi32(prices, _MM_SHUFFLE(1, 0, 3, 2)));
  least = _mm_min_epu32(least, _mm_shuffle_epi32(least, _MM_SHUFFLE(2, 3, 0, 1)));
  // A little more than the share, for the rounding of either; negative or NaN without a price.
  const __m128 bound = _mm_mul_ss(_mm_castsi128_ps(least), _mm_set_ss(1.01F / kRelegatedCostRatio));
  const __m256i bounds = _mm256_castps_si256(_mm256_broadcastss_ps(bound));
  const auto is_dearer = [cells, bounds](int v) __attribute__((target("avx2"), always_inline)) {
    const __m256i bits = _mm256_castps_si256(_mm256_add_ps(
        _mm256_loadu_ps(cells + first_of(v, NamedBy::kNumCells)), _mm256_setzero_ps()));
    // As integers the floats from 0.0 up sort as they do; a sign says that there is no price.
    return _mm256_or_si256(_mm256_cmpgt_epi32(bits, bounds), bits);
  };
  const __m256i all = _mm256_and_si256(_mm256_and_si256(is_dearer(0), is_dearer(1)), is_dearer(2));
  if (__builtin_expect(_mm256_movemask_ps(_mm256_castsi256_ps(all)) != 0xff, 0)) return kUnsure;
  // Masks again, as in take(): all ones, or none.
  const auto price = static_cast<Price>(_mm_cvtsi128_si32(least));
  const int chosen = -static_cast<int>(price < kNoPrice);
  const auto cheapest =
      static_cast<unsigned>(_mm_movemask_ps(_mm_castsi128_ps(_mm_cmpeq_epi32(prices, least)))) &
      static_cast<unsigned>(chosen);
  const __m128 is_chosen =
      _mm_castsi128_ps(_mm_load_si128(reinterpret_cast<const __m128i*>(kLowest.lanes[cheapest])));
  _mm_storeu_ps(own, _mm_andnot_ps(is_chosen, before));
  ask_for(static_cast<int>(ready & 0xff) & named.kept_channels & chosen, num_channels);
  const int cell = static_cast<int>(own - cells) + __builtin_ctz(cheapest | 1U << Named::kCells);
  return cell | ~chosen;
}

/// The same for an entry that leaves algorithm and protocol open: the cheapest of all cells. Ring
/// is never that and relegated, but for cells that cost nothing.
__attribute__((target("avx2"), always_inline)) inline int force_open(Ready ready, const Named* by,
                                                                     float* cells,
                                                                     int* num_channels) noexcept {
  if (ready >> 16 != NamedBy::index_of(kAuto, kAuto)) return kUnsure;
  constexpr int kCells = NamedBy::kNumCells;
  const auto load = [cells](int v) __attribute__((target("avx2"), always_inline)) {
    return _mm256_castps_si256(
        _mm256_add_ps(_mm256_loadu_ps(cells + first_of(v, kCells)), _mm256_setzero_ps()));
  };
  const __m256i prices[kVectors] = {load(0), load(1), load(2)};
  const __m256i eight = _mm256_min_epu32(_mm256_min_epu32(prices[0], prices[1]), prices[2]);
  __m128i least = _mm_min_epu32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  least = _mm_min_epu32(least, _mm_shuffle_epi32(least, _MM_SHUFFLE(1, 0, 3, 2)));
  least = _mm_min_epu32(least, _mm_shuffle_epi32(least, _MM_SHUFFLE(2, 3, 0, 1)));
  const auto price = static_cast<Price>(_mm_cvtsi128_si32(least));
  if (__builtin_expect(price == 0 || price >= kNoPrice, 0)) return kUnsure;
  const __m256i wanted = _mm256_broadcastd_epi32(least);
  unsigned equal = 0;
  for (int v = 0; v < kVectors; ++v) {
    const __m256i lanes = _mm256_cmpeq_epi32(prices[v], wanted);
    equal |= static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(lanes)))
             << first_of(v, kCells);
  }
  const int cell = __builtin_ctz(equal);
  cells[cell] = 0.0F;
  ask_for(static_cast<int>(ready & 0xff) &
              by[NamedBy::index_of(cell / kNumProtocols, kAuto)].kept_channels,
          num_channels);
  return cell;
}

}  // namespace dynamiccl

#endif
