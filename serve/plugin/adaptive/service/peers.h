// Whose addresses a leader tells each rank, once all have come.
#pragma once

#include <cstdint>

namespace dynamiccl {

inline constexpr int kMostPeers = 31;

/// Those that are 1, 2, 4, ... ranks further, into `peers`; returns how many. Whoever loses the
/// leader asks them, again and again, so what one of the ranks knows comes to all, and a leader of
/// n ranks sends n log2(n) addresses, where all of them to all would be n^2.
inline int peers_of(std::int32_t rank, std::int32_t num_ranks, std::int32_t* peers) noexcept {
  int count = 0;
  for (std::int64_t step = 1; step < num_ranks; step *= 2) {
    peers[count++] = static_cast<std::int32_t>((rank + step) % num_ranks);
  }
  return count;
}

}  // namespace dynamiccl
