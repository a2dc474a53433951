// plugin.index: the small text file of an artifact that the plugin reads (serve/plugin_index.py).
#pragma once

#include <cstddef>
#include <cstdint>

#include "crypto/sha256.h"

namespace dynamiccl {

inline constexpr std::size_t kMaxIndexBytes = 64 * 1024;
inline constexpr std::size_t kSystemBytes = 121;  // the longest name (serve/table.py) and its end

/// The index as text; look-ups search it, none of them on the hot path. 64 KiB, so allocate it on
/// the heap. All ranks compare the hash of the whole file, so lines that are not looked up are not
/// checked here; `dynamiccl-deploy verify` does that.
class PluginIndex {
 public:
  /// Read the file at `path`, which nobody else may write to. Returns null on success, else why the
  /// artifact must not be used.
  const char* load(const char* path) noexcept;

  /// The same from the file's bytes.
  const char* decode(const std::uint8_t* bytes, std::size_t size) noexcept;

  /// The hash of the file's bytes, which stands for the whole artifact.
  const char* artifact_hash() const noexcept { return artifact_hash_; }

  /// The system that a machine belongs to; false when the artifact does not know it.
  bool find_system(const char* fingerprint, char (&system)[kSystemBytes]) const noexcept;

  /// What the index says the hash of the table of one communicator shape is; false without one.
  bool table_hash(const char* system, std::size_t num_nodes, std::size_t num_ranks,
                  char (&hash)[kHexBytes]) const noexcept;

  /// The field behind `keys`, which end with a tab, on the only line that begins with them; false
  /// where none does, several do, or it does not fit.
  bool find(const char* keys, char* value, std::size_t capacity) const noexcept;

 private:
  char text_[kMaxIndexBytes + 1] = "";  // empty, or ends with a line's end
  char artifact_hash_[kHexBytes] = "";
};

}  // namespace dynamiccl
