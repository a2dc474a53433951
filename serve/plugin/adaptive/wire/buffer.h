// A FIFO byte buffer for input or output; no memory while empty.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace dynamiccl {

class Buffer {
 public:
  Buffer() = default;
  ~Buffer() { reset(); }
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    if (this != &other) {
      reset();
      swap(other);
    }
    return *this;
  }

  const std::uint8_t* bytes() const noexcept { return memory_ + begin_; }
  std::size_t size() const noexcept { return end_ - begin_; }

  /// Room for `more` bytes at the back, which count once add() says so; null when the buffer would
  /// then hold more than `bound`, or memory is short.
  std::uint8_t* room(std::size_t more, std::size_t bound) noexcept {
    if (more > bound || size() > bound - more) return nullptr;
    if (more > capacity_ - end_ && !make_room(more, bound)) return nullptr;
    return memory_ + end_;
  }

  void add(std::size_t more) noexcept { end_ += static_cast<std::uint32_t>(more); }

  void take(std::size_t bytes) noexcept {
    begin_ += static_cast<std::uint32_t>(bytes);
    if (begin_ == end_) reset();
  }

  void reset() noexcept {
    std::free(memory_);
    memory_ = nullptr;
    begin_ = end_ = capacity_ = 0;
  }

 private:
  static constexpr std::size_t kMinCapacity = 256;

  bool make_room(std::size_t more, std::size_t bound) noexcept {
    const std::size_t needed = size() + more;
    if (begin_ != 0) {
      std::memmove(memory_, memory_ + begin_, size());
      end_ -= begin_;
      begin_ = 0;
    }
    if (needed <= capacity_) return true;
    std::size_t capacity = capacity_ != 0 ? std::size_t{capacity_} * 2 : kMinCapacity;
    if (capacity > bound) capacity = bound;
    if (capacity < needed) capacity = needed;
    auto* memory = static_cast<std::uint8_t*>(std::realloc(memory_, capacity));
    if (memory == nullptr) return false;
    memory_ = memory;
    capacity_ = static_cast<std::uint32_t>(capacity);
    return true;
  }

  void swap(Buffer& other) noexcept {
    std::swap(memory_, other.memory_);
    std::swap(begin_, other.begin_);
    std::swap(end_, other.end_);
    std::swap(capacity_, other.capacity_);
  }

  std::uint8_t* memory_ = nullptr;
  std::uint32_t begin_ = 0;
  std::uint32_t end_ = 0;
  std::uint32_t capacity_ = 0;
};

}  // namespace dynamiccl
