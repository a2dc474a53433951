// Readers of environment variables; an unset one and an empty one are the same.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace dynamiccl {

/// The variable's value, or null.
inline const char* value_of(const char* variable) noexcept {
  const char* value = std::getenv(variable);
  return value != nullptr && value[0] != '\0' ? value : nullptr;
}

inline bool is_one(const char* variable) noexcept {
  const char* value = value_of(variable);
  return value != nullptr && std::strcmp(value, "1") == 0;
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

/// Where "23007=b300 22809=b300-old" has the system of an NCCL, up to a space; empty: nowhere.
inline const char* find_system(const char* systems, int nccl_version) noexcept {
  char key[16];
  std::snprintf(key, sizeof key, "%d=", nccl_version);
  const char* at = std::strstr(systems, key);
  while (at != nullptr && at != systems && at[-1] != ' ') at = std::strstr(at + 1, key);
  return at != nullptr ? at + std::strlen(key) : "";
}

}  // namespace dynamiccl
