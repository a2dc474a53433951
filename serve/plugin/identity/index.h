// plugin.index: the small text file of an artifact that the plugin reads (serve/plugin_index.py).
#pragma once

#include <cstddef>
#include <cstdint>

#include "crypto/sha256.h"

namespace dynamiccl {

inline constexpr std::size_t kMaxIndexBytes = 64 * 1024;
inline constexpr int kMaxIndexLines = 2048;
inline constexpr std::size_t kMaxIndexFieldBytes = 200;

/// What an artifact holds: hashes of its tables, and the machines that it knows. About 64 KiB, so
/// for the heap. Look-ups read the lines again: nothing here is on the hot path.
class PluginIndex {
 public:
  /// Read the file at `path`, which nobody else may write to. Returns null on success, else why the
  /// artifact must not be used.
  const char* load(const char* path) noexcept;

  /// The same from the file's bytes. Every field is checked, so that look-ups need not.
  const char* decode(const std::uint8_t* bytes, std::size_t size) noexcept;

  /// The hash of the file's bytes, which stands for the whole artifact.
  const std::uint8_t* artifact_hash() const noexcept { return artifact_hash_; }
  const std::uint8_t* manifest_hash() const noexcept { return manifest_hash_; }

  /// The system that a machine belongs to; null when the artifact does not know it. Lives as long
  /// as this index.
  const char* find_system(const char* fingerprint) const noexcept;

  /// The hash of the file of one communicator shape, of kind "table" or "constants"; false when
  /// there is no such file.
  bool file_hash(const char* kind, const char* system, std::size_t num_nodes, std::size_t num_ranks,
                 std::uint8_t hash[kDigestBytes]) const noexcept;

  /// By how much repeats of one call differ, in parts per million; -1: not known.
  std::int64_t noise_ppm(const char* system, int collective) const noexcept;

 private:
  static constexpr int kMaxFields = 5;

  struct Line {
    std::uint16_t offset;  // of the first field; the others follow, each behind a '\0'
    std::uint8_t num_fields;
  };

  const char* split(std::size_t size) noexcept;
  const char* check() noexcept;
  const char* check_line(int line) const noexcept;
  /// The field's text; empty where the line has none.
  const char* field(int line, int index) const noexcept;
  /// The line whose first `num_keys` fields are these; `num_lines_` when there is none.
  int find(const char* const* keys, int num_keys) const noexcept;
  bool repeats_an_earlier_one(int line) const noexcept;

  char text_[kMaxIndexBytes + 1];
  Line lines_[kMaxIndexLines];
  int num_lines_ = 0;
  std::uint8_t artifact_hash_[kDigestBytes];
  std::uint8_t manifest_hash_[kDigestBytes];
};

}  // namespace dynamiccl
