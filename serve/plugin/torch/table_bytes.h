// Writes a decision table's bytes; the format is serve/table.py's.
#pragma once

#include <cstdint>
#include <vector>

#include "file.h"
#include "table.h"

namespace dynamiccl {

inline void append_unsigned(std::vector<std::uint8_t>* bytes, std::uint64_t value, int size) {
  for (int i = 0; i < size; ++i) bytes->push_back(static_cast<std::uint8_t>(value >> (8 * i)));
}

/// `shape` is num_nodes, num_ranks, ranks_per_node, first_bin, num_bins; `entries` are
/// [collective][bin].
inline std::vector<std::uint8_t> table_bytes(const std::vector<std::int64_t>& shape,
                                             const std::vector<Entry>& entries) {
  std::vector<std::uint8_t> bytes(kMagic, kMagic + sizeof kMagic);
  append_unsigned(&bytes, kFormatVersion, 4);
  for (const std::int64_t value : shape) {
    append_unsigned(&bytes, static_cast<std::uint64_t>(value), 4);
  }
  append_unsigned(&bytes, kNumCollectives, 4);
  append_unsigned(&bytes, kBinsPerOctave, 4);
  append_unsigned(&bytes, kEntryBytes, 4);
  for (const Entry& entry : entries) {
    for (const std::int8_t column :
         {entry.algorithm, entry.protocol, entry.num_channels, entry.act}) {
      append_unsigned(&bytes, static_cast<std::uint8_t>(column), 1);
    }
    append_unsigned(&bytes, static_cast<std::uint32_t>(entry.chunk_bytes), 4);
  }
  append_unsigned(&bytes, fnv1a(bytes.data(), bytes.size()), 8);
  return bytes;
}

}  // namespace dynamiccl
