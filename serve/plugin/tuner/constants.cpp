// See constants.h. All numbers of a file are little-endian:
//   8 bytes "DCCONST\0", uint32 version 1, int32 num_nodes, int32 num_ranks, uint32 count,
//   `count` doubles, uint64 FNV-1a of all before it
#include "tuner/constants.h"

#include <cstring>

#include "file.h"

namespace dynamiccl {
namespace {

constexpr std::size_t kHeader = 24;

}  // namespace

const char* decode_constants(const std::uint8_t* bytes, std::size_t size,
                             TunerConstants* constants) noexcept {
  if (size != kConstantsFileBytes) return "its length is wrong";
  if (std::memcmp(bytes, "DCCONST", 8) != 0) return "it does not hold tuning constants";
  if (read_unsigned(bytes + 8, 4) != 1) return "its format version is another";
  if (read_unsigned(bytes + size - 8, 8) != fnv1a(bytes, size - 8)) {
    return "its checksum does not match";
  }
  constants->num_nodes = read_int32(bytes + 12);
  constants->num_ranks = read_int32(bytes + 16);
  if (read_unsigned(bytes + 20, 4) != kNumConstants) return "their number is another";
  for (std::size_t i = 0; i < kNumConstants; ++i) {
    const std::uint64_t bits = read_unsigned(bytes + kHeader + 8 * i, 8);
    std::memcpy(&constants->values[i], &bits, sizeof bits);
    const double value = constants->values[i];
    if (!(value >= 0.0 && value <= 1e12)) return "one is not a finite, positive number";
  }
  return nullptr;
}

const char* problem_with(const TunerConstants& constants,
                         const ncclTunerConstants_v5_t* own) noexcept {
  if (own == nullptr) return "this NCCL shows none (2.28 and later do)";
  double values[kNumConstants];
  std::memcpy(values, own, sizeof values);
  for (std::size_t i = 0; i < kNumConstants; ++i) {
    const double value = constants.values[i];
    if (value == 0.0) continue;
    // A constant that NCCL leaves at 0 is never changed.
    if (!(value <= values[i] * kMostTimesOwn && value * kMostTimesOwn >= values[i])) {
      return "one is out of bounds: 0.01 to 100 times NCCL's own";
    }
  }
  return nullptr;
}

void write_constants(const TunerConstants& constants, ncclTunerConstants_v5_t* own) noexcept {
  double values[kNumConstants];
  std::memcpy(values, own, sizeof values);
  for (std::size_t i = 0; i < kNumConstants; ++i) {
    if (constants.values[i] != 0.0) values[i] = constants.values[i];
  }
  std::memcpy(own, values, sizeof values);
}

}  // namespace dynamiccl
