// The decision table in memory. The file format is serve/table.py's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "file.h"
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

/// The file's first bytes.
struct TableHeader {
  std::uint8_t magic[8];
  std::uint32_t version;
  std::int32_t num_nodes;
  std::int32_t num_ranks;
  std::int32_t ranks_per_node;
  std::int32_t first_bin;
  std::int32_t num_bins;
  std::int32_t num_collectives;
  std::int32_t bins_per_octave;
  std::uint32_t entry_bytes;
};
static_assert(sizeof(TableHeader) == kHeaderBytes && sizeof(Entry) == kEntryBytes &&
                  __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
              "the file's, byte for byte");

/// About 10 KiB of plain numbers, without pointers, read-only once loaded.
struct DecisionTable : TableHeader {
  std::uint64_t checksum;
  Entry entries[kNumCollectives * kMaxBins];  // [collective][num_bins], row-major
};

/// Whether a table is made for communicators of this shape.
inline bool is_for(const TableHeader& table, std::size_t num_nodes,
                   std::size_t num_ranks) noexcept {
  return static_cast<std::size_t>(table.num_nodes) == num_nodes &&
         static_cast<std::size_t>(table.num_ranks) == num_ranks;
}

/// Whether every number of `entry` is known, and NCCL has a kernel for it.
inline bool entry_is_sound(int collective, const Entry& entry) noexcept {
  const bool in_range = entry.algorithm >= kAuto && entry.algorithm < kNumAlgorithms &&
                        entry.protocol >= kAuto && entry.protocol < kNumProtocols &&
                        entry.num_channels >= 0 && entry.num_channels <= kMaxChannels &&
                        (entry.act == 0 || entry.act == 1) && entry.chunk_bytes >= 0;
  if (!in_range) return false;
  const bool sets_a_knob = entry.algorithm != kAuto || entry.protocol != kAuto ||
                           entry.num_channels != 0 || entry.chunk_bytes != 0;
  if (sets_a_knob != (entry.act == 1)) return false;
  if (entry.algorithm == kAuto) return true;
  const unsigned valid = kValid[collective][entry.algorithm];
  return entry.protocol == kAuto ? valid != 0 : (valid >> entry.protocol & 1) != 0;
}

/// Quarter-octave bin of a size, bit for bit dynamiccl.sizes.size_bin; -1 where there is none.
inline int size_bin(std::uint64_t size_bytes) noexcept {
  if (size_bytes == 0 || size_bytes >> kMaxSizeBits != 0) return -1;
  const int zeros = __builtin_clzll(size_bytes);
  const std::uint64_t leading = size_bytes << zeros;
  const std::uint64_t mantissa = leading >> 31;  // in [2^32, 2^33)
  const auto quarter = static_cast<int>(leading >> 61 & 3);
  return kBinsPerOctave * (63 - zeros) + quarter + (mantissa >= kEdgesQ32[quarter]);
}
static_assert(kEdgesQ32[0] >> 30 == 4 && kEdgesQ32[1] >> 30 == 5 && kEdgesQ32[2] >> 30 == 6 &&
                  kEdgesQ32[3] >> 30 == 7 && kBinsPerOctave == 4,
              "for size_bin: each quarter of an octave has one edge in it");

/// Null on success, else why these bytes of a file must not be used. Every number is checked, once:
/// a wrong one could hang or crash a job, and look-ups rely on it.
inline const char* decode_table(const std::uint8_t* bytes, std::size_t size,
                                DecisionTable* table) noexcept {
  if (size < kHeaderBytes + kChecksumBytes) return "it is too short";
  std::memcpy(static_cast<TableHeader*>(table), bytes, kHeaderBytes);
  if (std::memcmp(table->magic, kMagic, sizeof kMagic) != 0) return "it is not a DynamICCL table";
  if (table->version != kFormatVersion) return "its format version is another";
  if (table->num_collectives != kNumCollectives || table->bins_per_octave != kBinsPerOctave ||
      table->entry_bytes != kEntryBytes) {
    return "its counts are of another vocabulary";
  }
  if (table->num_nodes < 1 || table->ranks_per_node < 1 || table->num_bins < 1 ||
      std::int64_t{table->num_nodes} * table->ranks_per_node != table->num_ranks ||
      table->first_bin < 0 || table->first_bin > kMaxBins - table->num_bins) {
    return "its shape is impossible";
  }
  const int num_entries = kNumCollectives * table->num_bins;
  const std::size_t entry_bytes = kEntryBytes * static_cast<std::size_t>(num_entries);
  const std::size_t body_end = kHeaderBytes + entry_bytes;
  if (size != body_end + kChecksumBytes) return "its length does not fit its header";
  std::memcpy(&table->checksum, bytes + body_end, kChecksumBytes);
  if (table->checksum != fnv1a(bytes, body_end)) return "its checksum does not match";
  std::memcpy(table->entries, bytes + kHeaderBytes, entry_bytes);
  for (int i = 0; i < num_entries; ++i) {
    if (!entry_is_sound(i / table->num_bins, table->entries[i])) {
      return "an entry is outside the vocabulary";
    }
  }
  return nullptr;
}

/// Leaves out what could fail a collective, whatever a table says. Chunk sizes: a rank that
/// simulates a group (ncclGroupSimulateEnd) would have NCCL's at its next call, and the others
/// ours. Channels of an AllGather from NCCL 2.29 on: AllGatherV takes the number as it is, and
/// indexes the communicator's by it (2.29.7 `src/scheduler/allgatherv_sched.cc:65,103`).
inline void leave_out_what_no_job_may_ask(int nccl_version, DecisionTable* table) noexcept {
  constexpr int kFirstWithAllGatherV = 22900;
  for (int i = 0; i < kNumCollectives * table->num_bins; ++i) {
    Entry& entry = table->entries[i];
    entry.chunk_bytes = 0;
    if (i / table->num_bins == kAllGather && nccl_version >= kFirstWithAllGatherV) {
      entry.num_channels = 0;
    }
    if (entry.algorithm == kAuto && entry.protocol == kAuto && entry.num_channels == 0) {
      entry.act = 0;
    }
  }
}

/// The entry for a call, or null to abstain.
inline const Entry* lookup(const DecisionTable& table, int collective,
                           std::uint64_t size_bytes) noexcept {
  if (collective < 0 || collective >= kNumCollectives) return nullptr;
  const int column = size_bin(size_bytes) - table.first_bin;  // negative for sizes without a bin
  if (static_cast<unsigned>(column) >= static_cast<unsigned>(table.num_bins)) return nullptr;
  const Entry* entry = &table.entries[collective * table.num_bins + column];
  return entry->act != 0 ? entry : nullptr;
}

}  // namespace dynamiccl
