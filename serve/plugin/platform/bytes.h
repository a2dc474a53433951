// Numbers into and out of bytes, little-endian on any processor.
#pragma once

#include <cstddef>
#include <cstdint>

#include "file.h"  // read_unsigned

namespace dynamiccl {

inline std::uint8_t* write_unsigned(std::uint64_t value, std::size_t size,
                                    std::uint8_t* out) noexcept {
  for (std::size_t i = 0; i < size; ++i) out[i] = static_cast<std::uint8_t>(value >> 8 * i);
  return out + size;
}

}  // namespace dynamiccl
