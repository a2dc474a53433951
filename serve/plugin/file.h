// Small binary files: opened, looked at, read whole, checksummed.
#pragma once

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "vocabulary.h"

namespace dynamiccl {

/// 64-bit FNV-1a.
inline std::uint64_t fnv1a(const void* bytes, std::size_t size) noexcept {
  std::uint64_t digest = kFnvOffset;
  for (std::size_t i = 0; i < size; ++i) {
    digest = (digest ^ static_cast<const std::uint8_t*>(bytes)[i]) * kFnvPrime;
  }
  return digest;
}

/// Whether there may be such a file: only where it surely is not, it is not.
inline bool may_exist(const char* path) noexcept {
  return access(path, F_OK) == 0 || (errno != ENOENT && errno != ENOTDIR);
}

/// Null where what was just opened may steer a job, or be written into; else why not: it could not
/// be opened, is of another kind, neither root's nor this user's, or its mode allows others what is
/// forbidden.
inline const char* why_not_ours(int descriptor, unsigned kind,
                                unsigned forbidden = S_IWGRP | S_IWOTH) noexcept {
  if (descriptor < 0 && errno == ENOENT) return "there is no such file";
  if (descriptor < 0 && errno == ELOOP) return "it is a symbolic link";
  if (descriptor < 0 && errno == ENOTDIR && kind == S_IFDIR) {
    return "it is not a directory, or a symbolic link to one";
  }
  if (descriptor < 0) return std::strerror(errno);
  // Not by fstat, which is versioned in glibc and would tie the plugin to 2.33.
  struct statx status = {};
  statx(descriptor, "", AT_EMPTY_PATH, STATX_TYPE | STATX_MODE | STATX_UID, &status);
  if ((status.stx_mode & S_IFMT) != kind) return "it is not a regular file";
  const unsigned owner = status.stx_uid;
  if (owner != 0 && owner != geteuid()) return "it belongs to another user";
  if ((status.stx_mode & (S_IWGRP | S_IWOTH)) != 0) return "others may write to it";
  return (status.stx_mode & forbidden) != 0 ? "others may read it" : nullptr;
}

/// Owns a file descriptor.
class File {
 public:
  // O_NONBLOCK: opening a FIFO without a writer would block forever.
  explicit File(const char* path, int flags = O_RDONLY | O_NONBLOCK, mode_t mode = 0644) noexcept
      : descriptor_(open(path, flags | O_CLOEXEC | O_NOCTTY, mode)) {}
  File() = default;
  ~File() { reset(-1); }
  File(const File&) = delete;

  void reset(int descriptor) noexcept {
    if (descriptor_ >= 0) close(descriptor_);
    descriptor_ = descriptor;
  }

  bool is_open() const noexcept { return descriptor_ >= 0; }
  int descriptor() const noexcept { return descriptor_; }

  /// Reads up to `capacity` bytes; -1 on an error.
  ssize_t read_all(void* buffer, std::size_t capacity) const noexcept {
    std::size_t filled = 0;
    while (filled < capacity) {
      const ssize_t got = read(descriptor_, static_cast<char*>(buffer) + filled, capacity - filled);
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
