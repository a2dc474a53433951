// Readers of environment variables; an unset one and an empty one are the same.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

namespace dynamiccl {

/// The variable's value, else `otherwise`.
inline const char* value_of(const char* variable, const char* otherwise = nullptr) noexcept {
  const char* value = std::getenv(variable);
  return value != nullptr && value[0] != '\0' ? value : otherwise;
}

inline bool is_one(const char* variable) noexcept {
  return std::strcmp(value_of(variable, ""), "1") == 0;
}

/// A decimal number; false when `text` is null or anything else. By hand: glibc's own functions got
/// new versions in 2.38.
inline bool parse_number(const char* text, std::uint64_t* number) noexcept {
  if (text == nullptr || text[0] == '\0') return false;
  *number = 0;
  for (; *text != '\0'; ++text) {
    if (*text < '0' || *text > '9' || *number > (~std::uint64_t{0} - 9) / 10) return false;
    *number = 10 * *number + static_cast<std::uint64_t>(*text - '0');
  }
  return true;
}

/// So many numbers of 16 hex digits, and nothing else.
inline bool parse_hex(const char* text, std::size_t count, std::uint64_t* numbers) noexcept {
  static constexpr char kDigits[] = "0123456789abcdef";
  if (text == nullptr || std::strlen(text) != 16 * count) return false;
  for (std::size_t i = 0; i < 16 * count; ++i) {
    const char* digit = std::strchr(kDigits, text[i]);
    if (digit == nullptr) return false;
    numbers[i / 16] = numbers[i / 16] << 4 | static_cast<std::uint64_t>(digit - kDigits);
  }
  return true;
}

/// The launcher's number of this process; -1: not known.
inline std::int32_t world_rank() noexcept {
  for (const char* variable :
       {"RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "PMI_RANK", "PMIX_RANK"}) {
    std::uint64_t rank = 0;
    if (!parse_number(value_of(variable), &rank)) continue;
    return rank <= 0x7fff'ffff ? static_cast<std::int32_t>(rank) : -1;
  }
  return -1;
}

/// Where "23007=b300 22809=b300-old" has the system of an NCCL, up to a space; empty: nowhere.
inline const char* find_system(const char* systems, int nccl_version) noexcept {
  char key[16];
  std::snprintf(key, sizeof key, "%d=", nccl_version);
  const char* at = std::strstr(systems, key);
  while (at != nullptr && at != systems && at[-1] != ' ') at = std::strstr(at + 1, key);
  return at != nullptr ? at + std::strlen(key) : "";
}

}  // namespace dynamiccl
