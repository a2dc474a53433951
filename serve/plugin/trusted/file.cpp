// Open first, then ask the open file: a path may mean something else a moment later.
#include "trusted/file.h"

#include <errno.h>
#include <string.h>  // explicit_bzero
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace dynamiccl {
namespace {

constexpr unsigned kOthersWrite = S_IWGRP | S_IWOTH;
constexpr unsigned kAllModeBits = 07777;
constexpr std::size_t kMaxPathBytes = 4096;

const char* why_not_opened(int error) noexcept {
  switch (error) {
    case ENOENT:
      return "there is no such file";
    case ELOOP:
      return "it is a symbolic link";
    case ENOTDIR:
      return "it is not a directory, or is a symbolic link, or lies in what is none";
    case EACCES:
    case EPERM:
      return "it may not be opened";
    default:
      return "it cannot be opened";
  }
}

const char* why_not_kind(unsigned kind, unsigned wanted) noexcept {
  if (kind == wanted) return nullptr;
  if (kind == S_IFLNK) return "it is a symbolic link";
  if (wanted == S_IFDIR) return "it is not a directory";
  return wanted == S_IFSOCK ? "it is not a socket" : "it is not a regular file";
}

const char* why_not_mode(unsigned mode, unsigned forbidden) noexcept {
  if ((mode & forbidden) == 0) return nullptr;
  if ((mode & kOthersWrite) != 0) return "others may write to it";
  return (mode & (S_IRGRP | S_IROTH)) != 0 ? "others may read it" : "its mode is not 0600 or 0400";
}

/// Why the open file must not be used, or null.
const char* check(int descriptor, unsigned kind, unsigned forbidden_mode,
                  bool sticky_of_root_will_do = false) noexcept {
  // Not fstat, which is versioned in glibc and would tie the plugin to 2.33.
  struct statx status;
  constexpr unsigned kFields = STATX_TYPE | STATX_MODE | STATX_UID;
  if (statx(descriptor, "", AT_EMPTY_PATH, kFields, &status) != 0 ||
      (status.stx_mask & kFields) != kFields) {
    return "its owner and mode cannot be read";
  }
  if (const char* problem = why_not_kind(status.stx_mode & S_IFMT, kind)) return problem;
  if (status.stx_uid != 0 && status.stx_uid != geteuid()) return "it belongs to another user";
  const bool as_tmp = status.stx_uid == 0 && (status.stx_mode & S_ISVTX) != 0;
  if (sticky_of_root_will_do && as_tmp) return nullptr;
  return why_not_mode(status.stx_mode & kAllModeBits, forbidden_mode);
}

/// Copies the first `length` bytes of a path that names a directory; false when they do not fit.
/// Without slashes at the end, since with one a link in the last place would be followed.
bool copy_directory(const char* path, std::size_t length, char (&copy)[kMaxPathBytes]) noexcept {
  while (length > 1 && path[length - 1] == '/') --length;
  if (length >= sizeof copy) return false;
  std::copy(path, path + length, copy);
  copy[length] = '\0';
  return true;
}

}  // namespace

const char* TrustedFile::open(const char* path, Readers readers, int directory) noexcept {
  close();
  // Without O_NONBLOCK a FIFO that has no writer would block here for ever.
  constexpr int kFlags = O_RDONLY | O_NONBLOCK | O_CLOEXEC | O_NOFOLLOW | O_NOCTTY;
  const unsigned allowed = readers == Readers::kAnyone ? kAllModeBits & ~kOthersWrite : 0600U;
  descriptor_ = openat(directory, path, kFlags);
  if (descriptor_ < 0) return why_not_opened(errno);
  const char* problem = check(descriptor_, S_IFREG, kAllModeBits & ~allowed);
  if (problem != nullptr) close();
  return problem;
}

const char* TrustedFile::open_directory(const char* path, DirectoryUse use) noexcept {
  close();
  char directory[kMaxPathBytes];
  if (!copy_directory(path, std::strlen(path), directory)) return "its path is too long";
  constexpr int kFlags = O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW;
  descriptor_ = ::open(directory, kFlags);
  if (descriptor_ < 0) return why_not_opened(errno);
  const char* problem = check(descriptor_, S_IFDIR, kOthersWrite, use == DirectoryUse::kParent);
  if (problem != nullptr) close();
  return problem;
}

const char* TrustedFile::read_all(std::uint8_t* buffer, std::size_t capacity,
                                  std::size_t* size) const noexcept {
  *size = 0;
  for (;;) {
    std::uint8_t one_more;
    const bool full = *size == capacity;
    const ssize_t got = full ? read(descriptor_, &one_more, 1)
                             : read(descriptor_, buffer + *size, capacity - *size);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return "it cannot be read";
    if (got == 0) return nullptr;
    if (full) return "it is too long";
    *size += static_cast<std::size_t>(got);
  }
}

void TrustedFile::close() noexcept {
  if (descriptor_ >= 0) ::close(descriptor_);
  descriptor_ = -1;
}

const char* read_trusted(const char* path, std::uint8_t* buffer, std::size_t capacity,
                         std::size_t* size) noexcept {
  *size = 0;
  TrustedFile file;
  if (const char* problem = file.open(path)) return problem;
  return file.read_all(buffer, capacity, size);
}

const char* check_trusted_socket(const char* path) noexcept {
  const char* slash = std::strrchr(path, '/');
  const char* name = slash != nullptr ? slash + 1 : path;
  char directory[kMaxPathBytes] = ".";
  if (slash != nullptr && !copy_directory(path, static_cast<std::size_t>(name - path), directory)) {
    return "its path is too long";
  }
  TrustedFile parent;
  if (parent.open_directory(directory, DirectoryUse::kParent) != nullptr) {
    return "its directory is not there, or others may write to it";
  }
  // O_PATH: a socket cannot be opened. To connect to it takes the right to write.
  const int descriptor = openat(parent.descriptor(), name, O_PATH | O_CLOEXEC | O_NOFOLLOW);
  if (descriptor < 0) return why_not_opened(errno);
  const char* problem = check(descriptor, S_IFSOCK, kOthersWrite);
  ::close(descriptor);
  return problem;
}

bool exists_trusted(const char* path, const char** why_not) noexcept {
  *why_not = nullptr;
  // O_PATH: a kill file of root's counts even where the job could not read it.
  const int descriptor = ::open(path, O_PATH | O_CLOEXEC | O_NOFOLLOW);
  if (descriptor < 0) {
    if (errno != ENOENT) *why_not = why_not_opened(errno);
    return false;
  }
  *why_not = check(descriptor, S_IFREG, kOthersWrite);
  ::close(descriptor);
  return *why_not == nullptr;
}

const char* load_key(const char* path, std::uint8_t key[kDigestBytes]) noexcept {
  TrustedFile file;
  if (const char* problem = file.open(path, Readers::kOwnerAlone)) return problem;
  std::uint8_t content[kMaxKeyFileBytes];
  std::size_t size = 0;
  const char* problem = file.read_all(content, sizeof content, &size);
  if (problem == nullptr && size < kMinKeyFileBytes) problem = "it is shorter than 16 bytes";
  if (problem == nullptr) {
    Sha256 hash;
    hash.update("dynamiccl-key", 13);
    hash.update(content, size);
    hash.finish(key);
  }
  explicit_bzero(content, sizeof content);
  return problem;
}

}  // namespace dynamiccl
