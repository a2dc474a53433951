// A decision table that several threads hold: the caller's, which looks up in it, and the
// agreement's, which stages it. Immutable; freed by whoever lets go of it last.
#pragma once

#include <atomic>
#include <cstdint>

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
};

}  // namespace dynamiccl
