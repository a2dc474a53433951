// strtod and strtoull read what people write; glibc's own newer versions of them are not asked for.
#include "identity/environment.h"

#include <cstdlib>
#include <cstring>

namespace dynamiccl {

const char* value_of(const char* variable) noexcept {
  const char* value = std::getenv(variable);
  return value != nullptr && value[0] != '\0' ? value : nullptr;
}

const char* first_value_of(const char* const* variables, std::size_t count) noexcept {
  for (std::size_t i = 0; i < count; ++i) {
    if (const char* value = value_of(variables[i])) return value;
  }
  return nullptr;
}

bool is_one(const char* variable) noexcept {
  const char* value = value_of(variable);
  return value != nullptr && std::strcmp(value, "1") == 0;
}

bool is_switched_on(const char* variable) noexcept {
  const char* value = value_of(variable);
  return value != nullptr && std::strcmp(value, "0") != 0;
}

bool parse_number(const char* text, std::uint64_t* number) noexcept {
  if (text == nullptr || text[0] == '\0') return false;
  *number = 0;
  for (; *text != '\0'; ++text) {
    if (*text < '0' || *text > '9' || *number > (~std::uint64_t{0} - 9) / 10) return false;
    *number = 10 * *number + static_cast<std::uint64_t>(*text - '0');
  }
  return true;
}

std::uint64_t duration_ns(const char* variable, std::uint64_t fallback_ns) noexcept {
  const char* text = value_of(variable);
  if (text == nullptr) return fallback_ns;
  char* end = nullptr;
  const double seconds = std::strtod(text, &end);
  const bool is_duration = *end == '\0' && seconds >= 0.0 && seconds <= 1e6;
  return is_duration ? static_cast<std::uint64_t>(seconds * 1e9) : fallback_ns;
}

}  // namespace dynamiccl
