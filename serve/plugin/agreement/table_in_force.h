// A decision table that several threads hold: the caller's, which looks up in it, and the
// agreement's, which stages it. Immutable; freed by whoever lets go of it last.
#pragma once

#include <atomic>
#include <cstdint>

#include "choice.h"
#include "table.h"

namespace dynamiccl {

struct TableInForce {
  /// Null when memory is short or the bytes are no sound table. The caller holds it.
  static TableInForce* decode(const std::uint8_t* bytes, std::size_t size,
                              std::uint32_t number) noexcept;
  /// One that abstains everywhere: NCCL's own choice.
  static TableInForce* abstaining(std::uint32_t number) noexcept;

  TableInForce* hold() noexcept {
    holders.fetch_add(1, std::memory_order_relaxed);
    return this;
  }
  void let_go() noexcept;

  std::atomic<std::int32_t> holders;
  std::uint32_t number;                  // 0: the one that a communicator begins with
  bool is_probe = false;                 // in force for a moment, to measure NCCL's own choice
  TableInForce* next_dropped = nullptr;  // the clock's
  DecisionTable decisions;
  static constexpr int kReadyBins = 256;
  static_assert(kMaxBins <= kReadyBins, "a power of two, which costs no multiplication");
  Ready ready[kNumCollectives * kReadyBins];  // the same, [collective][size bin]

  /// Where the call's is; -1 for none.
  static int find_ready(int collective, std::uint64_t size_bytes) noexcept {
    const int bin = size_bin(size_bytes);
    if (static_cast<unsigned>(collective) >= kNumCollectives || bin < 0) return -1;
    return collective * kReadyBins + bin;
  }
  Ready ready_at(int place) const noexcept {
    return place < 0 ? 0 : ready[static_cast<unsigned>(place)];
  }
  /// What the one at `place`, which is not 0, was made of.
  const Entry& entry_at(int place) const noexcept {
    const int collective = place / kReadyBins, bin = place % kReadyBins;
    return decisions.entries[collective * decisions.num_bins + bin - decisions.first_bin];
  }
};

}  // namespace dynamiccl
