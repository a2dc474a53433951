// Shared by the fuzz targets: checks that stop the fuzzer, and checksums that fit.
#pragma once

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

/// The input with a checksum that fits in its last eight bytes, as no fuzzer finds one by itself.
inline Bytes resealed(const std::uint8_t* bytes, std::size_t size) {
  Bytes out(bytes, bytes + size);
  if (size < 8) return out;
  const std::uint64_t digest = dynamiccl::fnv1a(bytes, size - 8);
  for (std::size_t i = 0; i < 8; ++i)
    out[size - 8 + i] = static_cast<std::uint8_t>(digest >> 8 * i);
  return out;
}
