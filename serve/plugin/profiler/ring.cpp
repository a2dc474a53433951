// A producer takes a cell by moving the head, fills it, and then passes its turn on.
#include "profiler/ring.h"

#include <sys/mman.h>

#include <cstdlib>
#include <new>

namespace dynamiccl {

Ring* Ring::create(std::size_t capacity) noexcept {
  void* memory = nullptr;
  if (posix_memalign(&memory, alignof(Ring), sizeof(Ring)) != 0) return nullptr;
  // Not calloc: for this size it could hand out pages that it has to clear, and so to touch,
  // itself.
  void* cells = mmap(nullptr, capacity * sizeof(Cell), PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (cells == MAP_FAILED) {
    std::free(memory);
    return nullptr;
  }
  Ring* ring = new (memory) Ring;
  ring->mask_ = capacity - 1;
  ring->shift_ = static_cast<unsigned>(__builtin_ctzll(capacity));
  ring->cells_ = static_cast<Cell*>(cells);
  return ring;
}

void Ring::destroy(Ring* ring) noexcept {
  if (ring == nullptr) return;
  munmap(ring->cells_, (ring->mask_ + 1) * sizeof(Cell));
  ring->~Ring();
  std::free(ring);
}

bool Ring::push(const CallRecord& record) noexcept {
  std::uint64_t head = head_.load(std::memory_order_relaxed);
  while (true) {
    Cell& cell = cells_[head & mask_];
    const std::uint64_t ours = 2 * (head >> shift_);
    const std::uint64_t turn = cell.turn.load(std::memory_order_acquire);
    if (turn == ours) {
      if (!head_.compare_exchange_weak(head, head + 1, std::memory_order_relaxed)) continue;
      cell.record = record;
      cell.turn.store(ours + 1, std::memory_order_release);
      return true;
    }
    if (turn < ours) {  // still full of the lap before
      dropped_.fetch_add(1, std::memory_order_relaxed);
      return false;
    }
    head = head_.load(std::memory_order_relaxed);  // another producer was faster
  }
}

bool Ring::pop(CallRecord* record) noexcept {
  Cell& cell = cells_[tail_ & mask_];
  const std::uint64_t filled = 2 * (tail_ >> shift_) + 1;
  if (cell.turn.load(std::memory_order_acquire) != filled) return false;
  *record = cell.record;
  cell.turn.store(filled + 1, std::memory_order_release);
  ++tail_;
  return true;
}

}  // namespace dynamiccl
