// Helpers of all loaders of small binary files: read whole, checksummed.
#pragma once

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>

#include "vocabulary.h"

namespace dynamiccl {

/// 64-bit FNV-1a.
inline std::uint64_t fnv1a(const std::uint8_t* bytes, std::size_t size) noexcept {
  std::uint64_t digest = kFnvOffset;
  for (std::size_t i = 0; i < size; ++i) digest = (digest ^ bytes[i]) * kFnvPrime;
  return digest;
}

/// Whether there may be such a file: only where it surely is not, it is not.
inline bool may_exist(const char* path) noexcept {
  return access(path, F_OK) == 0 || (errno != ENOENT && errno != ENOTDIR);
}

/// What an open file is and whose; both are 0 and root's where that cannot be read. Not by fstat,
/// which is versioned in glibc and would tie the plugin to 2.33.
struct FileStatus {
  unsigned mode;
  unsigned owner;
};
inline FileStatus status_of(int descriptor) noexcept {
  struct statx status = {};
  constexpr unsigned kFields = STATX_TYPE | STATX_MODE | STATX_UID;
  if (statx(descriptor, "", AT_EMPTY_PATH, kFields, &status) != 0) return {0, 0};
  return {status.stx_mode, status.stx_uid};
}

/// Null where what was opened may steer a job, or be written into; else why not: it is of another
/// kind, neither root's nor this user's, or its mode allows others what is forbidden.
inline const char* why_not_ours(int descriptor, unsigned kind,
                                unsigned forbidden = S_IWGRP | S_IWOTH) noexcept {
  const FileStatus status = status_of(descriptor);
  if ((status.mode & S_IFMT) != kind) {
    return kind == S_IFDIR ? "it is not a directory" : "it is not a regular file";
  }
  if (status.owner != 0 && status.owner != geteuid()) return "it belongs to another user";
  if ((status.mode & (S_IWGRP | S_IWOTH)) != 0) return "others may write to it";
  return (status.mode & forbidden) != 0 ? "others may read it" : nullptr;
}

/// Owns a file descriptor.
class File {
 public:
  // O_NONBLOCK: opening a FIFO without a writer would block forever.
  explicit File(const char* path, int flags = O_RDONLY | O_NONBLOCK) noexcept
      : descriptor_(open(path, flags | O_CLOEXEC | O_NOCTTY, 0644)) {}
  File() = default;
  ~File() { reset(-1); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  bool is_open() const noexcept { return descriptor_ >= 0; }
  int descriptor() const noexcept { return descriptor_; }
  void reset(int descriptor) noexcept {
    if (descriptor_ >= 0) close(descriptor_);
    descriptor_ = descriptor;
  }

  /// Reads up to `capacity` bytes; -1 on an error.
  ssize_t read_all(std::uint8_t* buffer, std::size_t capacity) const noexcept {
    std::size_t filled = 0;
    while (filled < capacity) {
      const ssize_t got = read(descriptor_, buffer + filled, capacity - filled);
      if (got == 0) break;
      if (got > 0) filled += static_cast<std::size_t>(got);
      if (got < 0 && errno != EINTR) return -1;
    }
    return static_cast<ssize_t>(filled);
  }

 private:
  int descriptor_ = -1;
};

}  // namespace dynamiccl
