// Line by line, in order: both sides write the same names in the same order.
#include "identity/difference.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

namespace dynamiccl {
namespace {

constexpr int kShownBytes = 70;

struct Line {
  const char* text;
  std::size_t length;
};

Line next_line(const char** text, const char* end) noexcept {
  const char* begin = *text;
  const char* stop = std::find(begin, end, '\n');
  *text = stop == end ? end : stop + 1;
  return {begin, static_cast<std::size_t>(stop - begin)};
}

/// What follows the name; printable characters alone are shown.
int value_of(const Line& line, std::size_t name_length, char (&shown)[kShownBytes + 1]) noexcept {
  const std::size_t from = std::min(line.length, name_length + 1);
  const int length = std::min(kShownBytes, static_cast<int>(line.length - from));
  for (int i = 0; i < length; ++i) {
    const char character = line.text[from + static_cast<std::size_t>(i)];
    shown[i] = character >= ' ' && character <= '~' ? character : '?';
  }
  shown[length] = '\0';
  return length;
}

}  // namespace

bool find_difference(const char* own, const char* other, std::size_t other_bytes,
                     char (&words)[200]) noexcept {
  const char* own_end = own + std::strlen(own);
  const char* other_end = other + other_bytes;
  while (own != own_end || other != other_end) {
    const Line mine = next_line(&own, own_end), theirs = next_line(&other, other_end);
    if (mine.length == theirs.length && std::memcmp(mine.text, theirs.text, mine.length) == 0) {
      continue;
    }
    const auto name_length =
        static_cast<std::size_t>(std::find(mine.text, mine.text + mine.length, '=') - mine.text);
    char my_value[kShownBytes + 1], their_value[kShownBytes + 1];
    value_of(mine, name_length, my_value);
    value_of(theirs, name_length, their_value);
    std::snprintf(words, sizeof words, "%.*s is %s, not %s",
                  static_cast<int>(std::min<std::size_t>(name_length, 20)), mine.text, their_value,
                  my_value);
    return true;
  }
  return false;
}

}  // namespace dynamiccl
