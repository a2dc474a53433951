// On the hot path: only computes, without a branch that costs.
#include "choice.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "choice_avx2.h"
#include "choice_cells.h"

namespace dynamiccl {
namespace {

/// A free cell before ours would win NCCL's tie, and the channels would then be another's.
int unless_tied(int chosen, Cells free) noexcept {
  return (free & ((Cells{1} << chosen) - 1)) != 0 ? -1 : chosen;
}

}  // namespace

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

namespace {

bool g_has_avx2 = false;
bool g_has_all = false;  // that hot_path.cpp is built for

__attribute__((constructor)) void look_at_processor() {
  __builtin_cpu_init();
  g_has_avx2 = __builtin_cpu_supports("avx2") != 0;
  // Compilers before GCC 11 do not know "lzcnt".
  constexpr unsigned kExtended = 0x80000001, kLzcnt = 1U << 5;
  unsigned a = 0, b = 0, c = 0, d = 0;
  const bool has_lzcnt = __get_cpuid(kExtended, &a, &b, &c, &d) != 0 && (c & kLzcnt) != 0;
  g_has_all = g_has_avx2 && has_lzcnt && __builtin_cpu_supports("bmi") != 0 &&
              __builtin_cpu_supports("bmi2") != 0;
}

}  // namespace

const Named* find_named(int num_nodes) noexcept {
  return g_has_all ? kNamed[num_nodes > 1 ? 1 : 0].entries : nullptr;
}

Ready make_ready(const Entry& entry) noexcept {
  if (entry.act == 0) return 0;
  const auto index = static_cast<Ready>(NamedBy::index_of(entry.algorithm, entry.protocol));
  const auto first = static_cast<Ready>(NamedBy::first_of(entry.algorithm));
  return index << 16 | first << 8 | static_cast<std::uint8_t>(entry.num_channels);
}

#else

const Named* find_named(int) noexcept { return nullptr; }

Ready make_ready(const Entry&) noexcept { return 0; }

#endif

int channels_for(const Entry& entry, int algorithm, int num_nodes) noexcept {
  return algorithm < kNumAlgorithms && clamps(algorithm, num_nodes) ? entry.num_channels : 0;
}

int force(const Entry& entry, int num_nodes, CostTable costs, int* num_channels) noexcept {
  if (entry.algorithm >= costs.num_algorithms) return -1;
#if defined(__x86_64__)
  if (g_has_avx2 && costs.num_algorithms == 7) {
    return force_any<21>(entry, num_nodes, costs.cells, num_channels);
  }
  if (g_has_avx2 && costs.num_algorithms == 6) {
    return force_any<18>(entry, num_nodes, costs.cells, num_channels);
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
