// Open first, then ask the open file: a path may mean something else a moment later.
#include "trusted/file.h"

#include <errno.h>
#include <string.h>  // explicit_bzero
#include <unistd.h>

#include <cstring>

namespace dynamiccl {
namespace {

constexpr unsigned kAllModeBits = 07777;

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

/// Why what was opened (-1: errno says why it was not) must not be used: it is of another kind, not
/// root's or the effective user's, or its mode allows what is forbidden.
const char* why_not_trusted(int descriptor, unsigned kind, unsigned forbidden_mode,
                            bool sticky_of_root_will_do = false) noexcept {
  if (descriptor < 0) return why_not_opened(errno);
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

}  // namespace

const char* read_trusted(const char* path, std::uint8_t* buffer, std::size_t capacity,
                         std::size_t* size, Readers readers) noexcept {
  *size = 0;
  // Without O_NONBLOCK a FIFO that has no writer would block here for ever.
  const File file(path, O_RDONLY | O_NONBLOCK | O_NOFOLLOW);
  const unsigned forbidden = readers == Readers::kAnyone ? kOthersWrite : kAllModeBits & ~0600U;
  if (const char* problem = why_not_trusted(file.descriptor(), S_IFREG, forbidden)) return problem;
  const ssize_t got = file.read_all(buffer, capacity);
  std::uint8_t one_more;
  if (got < 0) return "it cannot be read";
  *size = static_cast<std::size_t>(got);
  return *size == capacity && file.read_all(&one_more, 1) != 0 ? "it is too long" : nullptr;
}

const char* open_trusted_directory(std::string_view path, File* directory,
                                   bool sticky_of_root_will_do) noexcept {
  directory->reset(-1);
  // Without slashes at the end, since with one a link in the last place would be followed.
  while (path.size() > 1 && path.back() == '/') path.remove_suffix(1);
  char copy[4096] = "";
  if (path.size() >= sizeof copy) return "its path is too long";
  std::memcpy(copy, path.data(), path.size());
  directory->reset(open(copy, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW));
  const char* problem =
      why_not_trusted(directory->descriptor(), S_IFDIR, kOthersWrite, sticky_of_root_will_do);
  if (problem != nullptr) directory->reset(-1);
  return problem;
}

const char* check_trusted_socket(const char* path) noexcept {
  const char* slash = std::strrchr(path, '/');
  const char* name = slash != nullptr ? slash + 1 : path;
  const std::string_view directory =
      slash != nullptr ? std::string_view(path, static_cast<std::size_t>(name - path))
                       : std::string_view(".");
  File parent;
  if (open_trusted_directory(directory, &parent, true) != nullptr) {
    return "its directory is not there, or others may write to it";
  }
  // O_PATH: a socket cannot be opened. To connect to it takes the right to write.
  File socket;
  socket.reset(openat(parent.descriptor(), name, O_PATH | O_CLOEXEC | O_NOFOLLOW));
  return why_not_trusted(socket.descriptor(), S_IFSOCK, kOthersWrite);
}

const char* load_key(const char* path, std::uint8_t key[kDigestBytes]) noexcept {
  std::uint8_t content[kMaxKeyFileBytes];
  std::size_t size = 0;
  const char* problem = read_trusted(path, content, sizeof content, &size, Readers::kOwnerAlone);
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
