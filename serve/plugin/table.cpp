// Every byte of a table file is checked once, at load; look-ups rely on that.
#include "table.h"

#include <cstring>

#include "file.h"

namespace dynamiccl {
namespace {

bool shape_is_sound(const DecisionTable& table) noexcept {
  return table.num_nodes >= 1 && table.ranks_per_node >= 1 &&
         std::int64_t{table.num_nodes} * table.ranks_per_node == table.num_ranks &&
         table.first_bin >= 0 && table.num_bins >= 1 &&
         table.first_bin <= kMaxBins - table.num_bins;
}

bool combination_exists(int collective, int algorithm, int protocol) noexcept {
  if (algorithm == kAuto) return true;
  const bool* protocols = kValid[collective][algorithm];
  if (protocol != kAuto) return protocols[protocol];
  return protocols[kLL] || protocols[kLL128] || protocols[kSimple];
}

Entry read_entry(const std::uint8_t* bytes) noexcept {
  return {static_cast<std::int8_t>(bytes[0]), static_cast<std::int8_t>(bytes[1]),
          static_cast<std::int8_t>(bytes[2]), static_cast<std::int8_t>(bytes[3]),
          read_int32(bytes + 4)};
}

const char* read_header(const std::uint8_t* bytes, std::size_t size,
                        DecisionTable* table) noexcept {
  if (size < kHeaderBytes + kChecksumBytes) return "it is too short";
  if (std::memcmp(bytes, kMagic, sizeof kMagic) != 0) return "it is not a DynamICCL table";
  if (read_unsigned(bytes + 8, 4) != kFormatVersion) return "its format version is another";
  table->num_nodes = read_int32(bytes + 12);
  table->num_ranks = read_int32(bytes + 16);
  table->ranks_per_node = read_int32(bytes + 20);
  table->first_bin = read_int32(bytes + 24);
  table->num_bins = read_int32(bytes + 28);
  if (read_int32(bytes + 32) != kNumCollectives || read_int32(bytes + 36) != kBinsPerOctave ||
      read_unsigned(bytes + 40, 4) != kEntryBytes) {
    return "its counts are of another vocabulary";
  }
  return shape_is_sound(*table) ? nullptr : "its shape is impossible";
}

}  // namespace

bool entry_is_sound(int collective, const Entry& entry) noexcept {
  const bool in_range = entry.algorithm >= kAuto && entry.algorithm < kNumAlgorithms &&
                        entry.protocol >= kAuto && entry.protocol < kNumProtocols &&
                        entry.num_channels >= 0 && entry.num_channels <= kMaxChannels &&
                        (entry.act == 0 || entry.act == 1) && entry.chunk_bytes >= 0;
  if (!in_range) return false;
  const bool sets_a_knob = entry.algorithm != kAuto || entry.protocol != kAuto ||
                           entry.num_channels != 0 || entry.chunk_bytes != 0;
  return sets_a_knob == (entry.act == 1) &&
         combination_exists(collective, entry.algorithm, entry.protocol);
}

const char* decode_table(const std::uint8_t* bytes, std::size_t size,
                         DecisionTable* table) noexcept {
  if (const char* problem = read_header(bytes, size, table)) return problem;
  const int num_entries = kNumCollectives * table->num_bins;
  const std::size_t body_end = kHeaderBytes + kEntryBytes * static_cast<std::size_t>(num_entries);
  if (size != body_end + kChecksumBytes) return "its length does not fit its header";
  table->checksum = read_unsigned(bytes + body_end, kChecksumBytes);
  if (table->checksum != fnv1a(bytes, body_end)) return "its checksum does not match";
  for (int i = 0; i < num_entries; ++i) {
    table->entries[i] =
        read_entry(bytes + kHeaderBytes + kEntryBytes * static_cast<std::size_t>(i));
    if (!entry_is_sound(i / table->num_bins, table->entries[i])) {
      return "an entry is outside the vocabulary";
    }
  }
  return nullptr;
}

void leave_out_what_no_job_may_ask(int nccl_version, DecisionTable* table) noexcept {
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

}  // namespace dynamiccl
