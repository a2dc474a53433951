// The decision table in memory, and what an entry of it does to NCCL's cost table: scalar code that
// runs for every collective. The file format is serve/table.py's.
#pragma once

#include <algorithm>
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

/// NCCL's cost table: flat float[num_algorithms][num_protocols], microseconds, -1.0 = unavailable.
struct CostTable {
  float* cells;
  int num_algorithms;
  int num_protocols;
};

inline constexpr int kMostAlgorithms = 16;  // NCCL has 7, RCCL 8

/// Whether `costs` has a shape of a cost table; otherwise it is neither read nor written.
inline bool is_sound(CostTable costs) noexcept {
  return costs.num_protocols == kNumProtocols && costs.num_algorithms >= 1 &&
         costs.num_algorithms <= kMostAlgorithms;
}

/// Algorithms that lower a number of channels to what the communicator has; the others use it as it
/// is, and more than there are is out of range (2.30.7 `src/enqueue.cc`, scheduleCollTasksToPlan).
inline bool clamps_channels(int algorithm, int num_nodes) noexcept {
  if (algorithm == kNVLS || algorithm == kNVLSTree) return num_nodes == 1;
  return algorithm == kTree || algorithm == kRing || algorithm == kPAT;
}

/// A cost as an integer, compared without a branch: those above zero keep their order, 0.0 (and
/// -0.0, by the sum) is 0, and what is not available (negative) or no number is above infinity.
inline std::uint32_t order_of(float cost) noexcept {
  const float positive_zero = cost + 0.0F;
  std::uint32_t order = 0;
  std::memcpy(&order, &positive_zero, sizeof order);
  return order;
}

inline float cost_of(std::uint32_t order) noexcept {
  float cost = 0;
  std::memcpy(&cost, &order, sizeof cost);
  return cost;
}

/// Sets the cell that `entry` asks for to 0.0, so that it is the cheapest, and with it the number
/// of channels. Returns the cell's index, or -1 when nothing was touched. An AUTO knob takes NCCL's
/// cheapest among the cells that match. `costs` must be sound.
///
/// A cell that is free already would tie with ours, and which of the two wins depends on the
/// release (the first up to 2.30, the last from 2.31 on): then nothing is touched. NCCL takes Ring
/// out of the running where it costs 100 times as much as all else, and so do we.
inline int choose(const Entry& entry, int num_nodes, CostTable costs, int* num_channels) noexcept {
  constexpr std::uint32_t kNever = 0x7f800000;  // order_of(infinity)
  const int num_cells = costs.num_algorithms * kNumProtocols;
  const auto least = [&costs](int from, int to) {
    std::uint32_t lowest = kNever;
    for (int cell = from; cell < to; ++cell) lowest = std::min(lowest, order_of(costs.cells[cell]));
    return lowest;
  };
  constexpr int kFirstOfRing = kRing * kNumProtocols, kAfterRing = kFirstOfRing + kNumProtocols;
  const std::uint32_t ring = least(kFirstOfRing, std::min(kAfterRing, num_cells));
  const std::uint32_t other = std::min(least(0, kFirstOfRing), least(kAfterRing, num_cells));
  if (ring == 0 || other == 0) return -1;
  const bool leaves_ring_out = cost_of(ring) >= kRelegatedCostRatio * cost_of(other);
  const int first = entry.algorithm == kAuto ? 0 : entry.algorithm;
  const int last = entry.algorithm == kAuto ? costs.num_algorithms - 1 : entry.algorithm;
  int chosen = -1;
  std::uint32_t best = kNever;
  for (int algorithm = first; algorithm <= last && last < costs.num_algorithms; ++algorithm) {
    if (leaves_ring_out && algorithm == kRing) continue;
    for (int protocol = 0; protocol < kNumProtocols; ++protocol) {
      const int cell = algorithm * kNumProtocols + protocol;
      const bool is_meant = entry.protocol == kAuto || entry.protocol == protocol;
      const std::uint32_t order = is_meant ? order_of(costs.cells[cell]) : kNever;
      chosen = order < best ? cell : chosen;
      best = order < best ? order : best;
    }
  }
  if (chosen < 0) return -1;
  costs.cells[chosen] = 0.0F;
  if (entry.num_channels != 0 && clamps_channels(chosen / kNumProtocols, num_nodes)) {
    *num_channels = entry.num_channels;
  }
  return chosen;
}

}  // namespace dynamiccl
