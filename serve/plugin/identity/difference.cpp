// Compares line by line: both sides write the same names in the same order.
#include "identity/difference.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

namespace dynamiccl {
namespace {

constexpr std::size_t kShownBytes = 70;

/// The value of a line; only printable characters are shown.
void show(const char* line, const char* end, std::size_t name_bytes,
          char (&shown)[kShownBytes + 1]) noexcept {
  end = std::find(line, end, '\n');
  const char* value = line + std::min(name_bytes + 1, static_cast<std::size_t>(end - line));
  std::size_t length = 0;
  for (; value != end && length < kShownBytes; ++value) {
    shown[length++] = *value >= ' ' && *value <= '~' ? *value : '?';
  }
  shown[length] = '\0';
}

}  // namespace

bool find_difference(const char* own, const char* other, std::size_t other_bytes,
                     char (&words)[200]) noexcept {
  const std::size_t own_bytes = std::strlen(own), shorter = std::min(own_bytes, other_bytes);
  std::size_t at = 0;
  while (at < shorter && own[at] == other[at]) ++at;
  if (at == own_bytes && at == other_bytes) return false;
  while (at > 0 && own[at - 1] != '\n') --at;  // to the beginning of the line
  const std::size_t name_bytes = std::strcspn(own + at, "=\n");
  char my_value[kShownBytes + 1], their_value[kShownBytes + 1];
  show(own + at, own + own_bytes, name_bytes, my_value);
  show(other + at, other + other_bytes, name_bytes, their_value);
  std::snprintf(words, sizeof words, "%.*s is %s, not %s",
                static_cast<int>(std::min<std::size_t>(name_bytes, 20)), own + at, their_value,
                my_value);
  return true;
}

}  // namespace dynamiccl
