// Tuning constants of an artifact, which replace those of NCCL's own cost model (NCCL 2.28 and
// later). They are written once, inside `init`; NCCL then decides by itself, and nothing of ours
// runs in a call. The file is written by serve/constants.py.
#pragma once

#include <cstddef>
#include <cstdint>

#include "nccl/tuner_abi.h"

namespace dynamiccl {

inline constexpr std::size_t kNumConstants = sizeof(ncclTunerConstants_v5_t) / sizeof(double);
inline constexpr std::size_t kConstantsFileBytes = 24 + 8 * kNumConstants + 8;
/// Largest factor between a value and NCCL's own, either way: keeps predicted costs sane.
inline constexpr double kMostTimesOwn = 100.0;

struct TunerConstants {
  std::int32_t num_nodes, num_ranks;
  double values[kNumConstants];  // in the order of NCCL's; 0: NCCL's own stays
};

/// Reads a file's bytes. Returns null on success, else why the constants must not be used.
const char* decode_constants(const std::uint8_t* bytes, std::size_t size,
                             TunerConstants* constants) noexcept;

/// Null if NCCL's own constants (null: it passes none) may be replaced by these, else why not.
const char* problem_with(const TunerConstants& constants,
                         const ncclTunerConstants_v5_t* own) noexcept;

void write_constants(const TunerConstants& constants, ncclTunerConstants_v5_t* own) noexcept;

}  // namespace dynamiccl
