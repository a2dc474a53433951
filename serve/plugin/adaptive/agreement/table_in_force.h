// A reference-counted, immutable decision table: the calling thread looks up in it, the agreement's
// thread stages it. The last one to release it frees it.
#pragma once

#include <atomic>
#include <cstdint>

#include "table.h"

namespace dynamiccl {

struct TableInForce {
  /// Null when out of memory or the bytes are no valid table. The caller holds a reference.
  static TableInForce* decode(const std::uint8_t* bytes, std::size_t size,
                              std::uint32_t number) noexcept;
  /// A table that abstains everywhere: NCCL's own choice.
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
