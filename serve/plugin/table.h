// The decision table in memory: load, validate, look up. The file format is serve/table.py's.
#pragma once

#include <cstddef>
#include <cstdint>

#include "vocabulary.h"

namespace dynamiccl {

/// One decision; the columns of ENTRY in serve/table.py.
struct Entry {
  std::int8_t algorithm;     // kAuto: NCCL decides
  std::int8_t protocol;      // kAuto: NCCL decides
  std::int8_t num_channels;  // 0: NCCL decides
  std::int8_t act;           // 0: abstain
  std::int32_t chunk_bytes;  // 0: NCCL decides; used in sweep mode alone
};

/// About 10 KiB of plain numbers, without pointers, read-only once loaded.
struct DecisionTable {
  std::int32_t num_nodes;
  std::int32_t num_ranks;
  std::int32_t ranks_per_node;
  std::int32_t first_bin;
  std::int32_t num_bins;
  std::uint64_t checksum;
  Entry entries[kNumCollectives * kMaxBins];  // [collective][num_bins], row-major
};

/// Whether every number of `entry` is in the vocabulary, and NCCL has a kernel for it.
bool entry_is_sound(int collective, const Entry& entry) noexcept;

/// Quarter-octave bin of a size, bit for bit dynamiccl.sizes.size_bin; -1 where there is none.
inline int size_bin(std::uint64_t size_bytes) noexcept {
  if (size_bytes == 0 || size_bytes >> kMaxSizeBits != 0) return -1;
  const int zeros = __builtin_clzll(size_bytes);
  const std::uint64_t mantissa = size_bytes << zeros >> 31;  // in [2^32, 2^33)
  static_assert(sizeof kEdgesQ32 == 4 * sizeof kEdgesQ32[0],
                "spelled out: not a loop on every call");
  return kBinsPerOctave * (63 - zeros) + (mantissa >= kEdgesQ32[0]) + (mantissa >= kEdgesQ32[1]) +
         (mantissa >= kEdgesQ32[2]) + (mantissa >= kEdgesQ32[3]);
}

/// Decode a table file's bytes. Returns null on success, else why the table must not be used; every
/// number is checked against the vocabulary, since a wrong one could hang or crash a job.
const char* decode_table(const std::uint8_t* bytes, std::size_t size,
                         DecisionTable* table) noexcept;

/// Read and decode the file at `path`. Returns null on success, else why not.
const char* load_table(const char* path, DecisionTable* table) noexcept;

/// The entry for a call, or null to abstain: unknown collective, size outside the table, act 0.
inline const Entry* lookup(const DecisionTable& table, int collective,
                           std::uint64_t size_bytes) noexcept {
  if (collective < 0 || collective >= kNumCollectives) return nullptr;
  const int column = size_bin(size_bytes) - table.first_bin;  // negative for sizes without a bin
  if (column < 0 || column >= table.num_bins) return nullptr;
  const Entry* entry = &table.entries[collective * table.num_bins + column];
  return entry->act != 0 ? entry : nullptr;
}

}  // namespace dynamiccl
