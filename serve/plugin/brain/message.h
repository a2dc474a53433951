// What a leader and its brain say to each other, a line of JSON each: the leader (arbiter/) writes
// questions to the brain's stdin, one at a time, and reads answers from its stdout. A brain is
// dynamiccl-brain (torch/), `dynamiccl-deploy brain` (serve/brain.py), or anybody's program.
//
// {"number": 7, "brain": 3, "forgotten": [1, 2], "artifact": "/a", "system": "box", "num_nodes": 1,
//  "num_ranks": 8, "table": "4443...", "tasks": [[4, 80, 17, [[1048576, 50.125, 1, 0, 8, -1]]]]}
//   brain     whose question it is: another communicator has another one, as has another artifact
//   forgotten brains that will not ask any more
//   artifact  its directory; system: as its plugin.index names this machine
//   table     in force: the bytes of a table file (serve/table.py) in hexadecimal; "": NCCL's own
//             choice everywhere
//   tasks     each that has had timed calls: collective, size bin, timed calls so far, and the last
//             of these, the oldest first: bytes, us, algorithm, protocol, channels as used, us of
//             skew; not known is -1, of channels 0. Of a choice that was withdrawn: -1, and the
//             calls by which it was judged
//
// {"number": 7, "table": "4443..."}   the whole next table
// {"number": 7}                       the table in force stays
// {"number": 7, "error": "why"}       it stays, too
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "vocabulary.h"

namespace dynamiccl {

/// Calls of one task that a brain sees (WINDOW_LENGTH of datasets/features.py).
inline constexpr std::size_t kWindow = 8;
/// Of any line; the longest question that exists is shorter.
inline constexpr std::size_t kMostLineBytes = std::size_t{1} << 20;
inline constexpr std::string_view kHexDigits = "0123456789abcdef";

struct TimedCall {
  std::uint64_t size_bytes = 0;  // NCCL's nBytes
  double time_us = 0.0;          // minimum over ranks, more than 0
  double skew_us = -1.0;
  int algorithm = kAuto, protocol = kAuto, num_channels = 0;
};

/// One task key with timed calls. One that is not listed is decided as at the start of a job.
struct TimedTask {
  int collective = 0;            // ncclFunc_t, 0 .. 4
  int bin = 0;                   // size bin (dynamiccl/sizes.py)
  std::int64_t num_timed = 0;    // so far, of which `calls` are the last
  std::vector<TimedCall> calls;  // at most kWindow, the oldest first
};

struct BrainQuestion {
  std::string artifact, system;
  std::uint32_t num_nodes = 0, num_ranks = 0;
  std::vector<std::uint8_t> table;
  std::vector<TimedTask> tasks;
  std::uint64_t brain = 0;
  std::vector<std::uint64_t> forgotten = {};
  std::uint64_t number = 0;
};

/// Takes what it is asked for from the front of a line; false where there is something else.
class JsonReader {
 public:
  explicit JsonReader(const std::string& line) : next_(line.c_str()), end_(next_ + line.size()) {}

  bool has_ended() { return skip() == '\0' && next_ == end_; }

  template <typename Number>
  bool number(Number* to) {
    if (std::strchr("-0123456789", skip()) == nullptr || *next_ == '\0') return false;
    char* after = nullptr;
    const double value = std::strtod(next_, &after);
    const bool fits = after != next_ && std::fabs(value) < 0x1p62 &&
                      value >= static_cast<double>(std::numeric_limits<Number>::lowest()) &&
                      value <= static_cast<double>(std::numeric_limits<Number>::max());
    next_ = after;
    if (fits) *to = static_cast<Number>(value);
    return fits;
  }

  /// So many, with commas between them.
  template <typename First, typename... Rest>
  bool numbers(First* first, Rest*... rest) {
    return number(first) && ((take(',') && number(rest)) && ...);
  }

  /// Escapes but for quotes and slashes become '?' and what follows them.
  bool text(std::string* to) {
    to->clear();
    if (!take('"')) return false;
    for (; *next_ != '"'; ++next_) {
      const bool is_escape = *next_ == '\\';
      if (is_escape) ++next_;
      if (*next_ == '\0') return false;
      *to += is_escape && std::strchr("\"\\/", *next_) == nullptr ? '?' : *next_;
    }
    return take('"');
  }

  /// A text of hexadecimal digits.
  bool bytes(std::vector<std::uint8_t>* to) {
    std::string digits;
    if (!text(&digits) || digits.size() % 2 != 0) return false;
    to->clear();
    for (std::size_t at = 0; at < digits.size(); at += 2) {
      const std::size_t high = kHexDigits.find(digits[at]), low = kHexDigits.find(digits[at + 1]);
      if (high == kHexDigits.npos || low == kHexDigits.npos) return false;
      to->push_back(static_cast<std::uint8_t>(high << 4 | low));
    }
    return true;
  }

  /// `item()` takes each.
  template <typename Item>
  bool array(const Item& item, const char* ends = "[]") {
    if (!take(ends[0])) return false;
    if (take(ends[1])) return true;
    do {
      if (!item()) return false;
    } while (take(','));
    return take(ends[1]);
  }

  /// `field(name)` takes the value of each.
  template <typename Field>
  bool object(const Field& field) {
    std::string name;
    return array([&] { return text(&name) && take(':') && field(name); }, "{}");
  }

  bool take(char wanted) {
    if (skip() != wanted) return false;
    ++next_;
    return true;
  }

 private:
  char skip() {
    next_ += std::strspn(next_, " \t\r\n");
    return *next_;
  }

  const char *next_, *end_;
};

inline std::string json_of(const std::string& text) {
  std::string json = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') json += '\\';
    json += c >= 0 && c < ' ' ? '?' : c;
  }
  return json + '"';
}

template <typename Bytes>
std::string hex_of_bytes(const Bytes& bytes) {
  std::string digits;
  for (const auto byte : bytes) {
    digits += kHexDigits[byte >> 4 & 15];
    digits += kHexDigits[byte & 15];
  }
  return digits;
}

}  // namespace dynamiccl
