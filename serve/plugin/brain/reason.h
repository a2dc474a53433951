// A brain's error text as one printable line for NCCL's log.
#pragma once

#include <cstdarg>
#include <cstddef>
#include <cstdio>

namespace dynamiccl {

/// Replaces what is not printable ASCII, in place.
inline void make_printable(char* text) noexcept {
  for (; *text != '\0'; ++text) {
    if (*text < 0x20 || *text > 0x7e) *text = '?';
  }
}

__attribute__((format(printf, 3, 4))) inline void say(char* reason, std::size_t reason_bytes,
                                                      const char* format, ...) noexcept {
  if (reason == nullptr || reason_bytes == 0) return;
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(reason, reason_bytes, format, arguments);
  va_end(arguments);
  make_printable(reason);
}

}  // namespace dynamiccl
