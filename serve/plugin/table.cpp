// Every byte of a table file is checked once, at load; look-ups rely on that.
#include "table.h"

#include <cstring>

#include "file.h"

namespace dynamiccl {
namespace {

bool combination_exists(int collective, int algorithm, int protocol) noexcept {
  if (algorithm == kAuto) return true;
  const bool* protocols = kValid[collective][algorithm];
  if (protocol != kAuto) return protocols[protocol];
  return protocols[kLL] || protocols[kLL128] || protocols[kSimple];
}

const char* why_not_header(const TableHeader& header) noexcept {
  if (std::memcmp(header.magic, kMagic, sizeof kMagic) != 0) return "it is not a DynamICCL table";
  if (header.version != kFormatVersion) return "its format version is another";
  if (header.num_collectives != kNumCollectives || header.bins_per_octave != kBinsPerOctave ||
      header.entry_bytes != kEntryBytes) {
    return "its counts are of another vocabulary";
  }
  const bool is_possible =
      header.num_nodes >= 1 && header.ranks_per_node >= 1 &&
      std::int64_t{header.num_nodes} * header.ranks_per_node == header.num_ranks &&
      header.first_bin >= 0 && header.num_bins >= 1 &&
      header.first_bin <= kMaxBins - header.num_bins;
  return is_possible ? nullptr : "its shape is impossible";
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
  if (size < kHeaderBytes + kChecksumBytes) return "it is too short";
  std::memcpy(static_cast<TableHeader*>(table), bytes, kHeaderBytes);
  if (const char* problem = why_not_header(*table)) return problem;
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
