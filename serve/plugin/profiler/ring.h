// Lock-free, wait-free queue from many threads to one.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "profiler/record.h"

namespace dynamiccl {

/// A bounded queue, after D. Vyukov's. When it is full a record is dropped and counted: whoever
/// calls a collective is never held up. Nothing is allocated after its creation.
class Ring {
 public:
  /// `capacity` is a power of two; null when memory is short. Pages are taken only when first used.
  static Ring* create(std::size_t capacity) noexcept;
  static void destroy(Ring* ring) noexcept;

  /// From any thread. False when the ring is full; then it is counted.
  bool push(const CallRecord& record) noexcept;

  /// From one thread at a time. False when there is nothing.
  bool pop(CallRecord* record) noexcept;

  std::uint64_t dropped() const noexcept { return dropped_.load(std::memory_order_relaxed); }

 private:
  /// `turn` says whose the cell is: 2 x lap for the producer of that lap, one more for the
  /// consumer. So memory full of zeros is an empty ring.
  struct Cell {
    std::atomic<std::uint64_t> turn;
    CallRecord record;
  };

  Ring() = default;

  std::size_t mask_ = 0;
  unsigned shift_ = 0;
  Cell* cells_ = nullptr;
  alignas(64) std::atomic<std::uint64_t> head_{0};  // of the producers
  alignas(64) std::atomic<std::uint64_t> dropped_{0};
  std::uint64_t tail_ = 0;  // of the consumer
};

}  // namespace dynamiccl
