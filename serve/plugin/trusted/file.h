// Files that may steer a job: who owns them and who may write to them is checked before they count.
//
// Everything is checked on the open file, so that it cannot be exchanged between check and use, and
// no link in the last place of a path is followed. In a container that does not map root, what the
// host's root owns belongs to "nobody" and does not count. Where a function returns text, it is
// null on success, else one clause that says why not.
#pragma once

#include <sys/stat.h>

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "../file.h"  // "file.h" would be this one
#include "crypto/sha256.h"

namespace dynamiccl {

inline constexpr std::size_t kMinKeyFileBytes = 16;
inline constexpr std::size_t kMaxKeyFileBytes = 4096;
inline constexpr unsigned kOthersWrite = S_IWGRP | S_IWOTH;

/// Who, besides its owner, may read a file.
enum class Readers {
  kAnyone,
  kOwnerAlone,  // the mode is exactly 0600 or 0400
};

/// Opens, checks and reads a whole regular file into `buffer`.
const char* read_trusted(const char* path, std::uint8_t* buffer, std::size_t capacity,
                         std::size_t* size, Readers readers = Readers::kAnyone) noexcept;

/// Opens a directory in which nobody else may add, exchange or remove anything. Where what is in it
/// is checked too, a sticky directory of root's, as /tmp, will do.
const char* open_trusted_directory(std::string_view path, File* directory,
                                   bool sticky_of_root_will_do = false) noexcept;

/// Whether a socket at `path` may be connected to: null, or why not. Its directory is checked too:
/// only that keeps another from taking its place until then.
const char* check_trusted_socket(const char* path) noexcept;

/// The key of a job's messages: SHA-256 of "dynamiccl-key" and the bytes of the file, which has 16
/// to 4096 of them and mode 0600 or 0400.
const char* load_key(const char* path, std::uint8_t key[kDigestBytes]) noexcept;

}  // namespace dynamiccl
