// Implementation of table.h.
#include "table.h"

#include <cstring>

#include "file.h"

namespace dynamiccl {

bool entry_is_sound(int collective, const Entry& entry) noexcept {
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

const char* decode_table(const std::uint8_t* bytes, std::size_t size,
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
