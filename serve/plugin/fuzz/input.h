// Shared by the fuzz targets: checks that stop the fuzzer, and input bytes as a stream of numbers.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "file.h"

using Bytes = std::vector<std::uint8_t>;

#define REQUIRE(condition)                                                 \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                        \
    }                                                                      \
  } while (false)

/// Takes numbers and bytes from the front of an input; zeros once it is used up.
class Input {
 public:
  Input(const std::uint8_t* bytes, std::size_t size) : bytes_(bytes), size_(size) {}

  bool empty() const { return size_ == 0; }

  std::uint64_t number(std::size_t size) {
    std::uint64_t value = 0;
    for (std::size_t i = 0; i < size && size_ != 0; ++i, ++bytes_, --size_) {
      value |= std::uint64_t{*bytes_} << (8 * i);
    }
    return value;
  }

  /// The next `size` bytes, or those that are left.
  Bytes bytes(std::size_t size) {
    const std::size_t taken = std::min(size, size_);
    const Bytes out(bytes_, bytes_ + taken);
    bytes_ += taken;
    size_ -= taken;
    return out;
  }

  Bytes rest() { return bytes(size_); }

 private:
  const std::uint8_t* bytes_;
  std::size_t size_;
};

/// The input with a checksum that fits in its last eight bytes, as no fuzzer finds one by itself.
inline Bytes resealed(const std::uint8_t* bytes, std::size_t size) {
  Bytes out(bytes, bytes + size);
  if (size < 8) return out;
  const std::uint64_t digest = dynamiccl::fnv1a(bytes, size - 8);
  for (std::size_t i = 0; i < 8; ++i)
    out[size - 8 + i] = static_cast<std::uint8_t>(digest >> 8 * i);
  return out;
}
