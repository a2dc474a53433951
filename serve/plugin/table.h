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
int size_bin(std::uint64_t size_bytes) noexcept;

/// Decode a table file's bytes. Returns null on success, else why the table must not be used; every
/// number is checked against the vocabulary, since a wrong one could hang or crash a job.
const char* decode_table(const std::uint8_t* bytes, std::size_t size,
                         DecisionTable* table) noexcept;

/// Read and decode the file at `path`. Returns null on success, else why not.
const char* load_table(const char* path, DecisionTable* table) noexcept;

/// The entry for a call, or null to abstain: unknown collective, size outside the table, act 0.
const Entry* lookup(const DecisionTable& table, int collective, std::uint64_t size_bytes) noexcept;

}  // namespace dynamiccl
