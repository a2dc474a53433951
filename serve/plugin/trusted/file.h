// Files that may steer a job: who owns them and who may write to them is checked before they count.
//
// Everything is checked on the open file, so that it cannot be exchanged between check and use, and
// no link in the last place of a path is followed. In a container that does not map root, what the
// host's root owns belongs to "nobody" and does not count. Where a function returns text, it is
// null on success, else one clause that says why not.
#pragma once

#include <fcntl.h>

#include <cstddef>
#include <cstdint>

#include "crypto/sha256.h"

namespace dynamiccl {

inline constexpr std::size_t kMinKeyFileBytes = 16;
inline constexpr std::size_t kMaxKeyFileBytes = 4096;

/// Who, besides its owner, may read a file.
enum class Readers {
  kAnyone,
  kOwnerAlone,  // the mode is exactly 0600 or 0400
};

/// What a directory is needed for.
enum class DirectoryUse {
  kContent,  // nobody else may add, exchange or remove what is in it
  kParent,   // what is in it is checked too, so that a sticky directory of root's, as /tmp, will do
};

/// Owns a descriptor of something that root or the effective user owns and nobody else may change.
class TrustedFile {
 public:
  TrustedFile() = default;
  ~TrustedFile() { close(); }
  TrustedFile(const TrustedFile&) = delete;
  TrustedFile& operator=(const TrustedFile&) = delete;

  /// Opens a regular file for reading; a relative path begins at `directory`.
  const char* open(const char* path, Readers readers = Readers::kAnyone,
                   int directory = AT_FDCWD) noexcept;

  /// Opens a directory, for openat and the like.
  const char* open_directory(const char* path, DirectoryUse use = DirectoryUse::kContent) noexcept;

  /// Reads from here to the end; "it is too long" when that is more than `capacity`.
  const char* read_all(std::uint8_t* buffer, std::size_t capacity,
                       std::size_t* size) const noexcept;

  bool is_open() const noexcept { return descriptor_ >= 0; }
  int descriptor() const noexcept { return descriptor_; }
  void close() noexcept;

 private:
  int descriptor_ = -1;
};

/// Opens, checks and reads a whole file into `buffer`.
const char* read_trusted(const char* path, std::uint8_t* buffer, std::size_t capacity,
                         std::size_t* size) noexcept;

/// Whether a socket at `path` may be connected to. Its directory is checked too: only that keeps
/// another from taking its place until then.
const char* check_trusted_socket(const char* path) noexcept;

/// Whether a regular file is there that counts, readable or not: the kill file. Where one is there
/// that does not count, `*why_not` says why; else it is null.
bool exists_trusted(const char* path, const char** why_not) noexcept;

/// The key of a job's messages: SHA-256 of "dynamiccl-key" and the bytes of the file, which has 16
/// to 4096 of them and mode 0600 or 0400.
const char* load_key(const char* path, std::uint8_t key[kDigestBytes]) noexcept;

}  // namespace dynamiccl
