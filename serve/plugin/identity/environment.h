// Readers of environment variables; an unset one and an empty one are the same.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dynamiccl {

/// The variable's value, or null.
const char* value_of(const char* variable) noexcept;

/// The first of the variables that is set, or null.
const char* first_value_of(const char* const* variables, std::size_t count) noexcept;

/// Whether the variable is "1".
bool is_one(const char* variable) noexcept;

/// Whether the variable is set and not "0", as NCCL takes its own switches.
bool is_switched_on(const char* variable) noexcept;

/// A decimal number; false when `text` is null or anything else.
bool parse_number(const char* text, std::uint64_t* number) noexcept;

/// A duration in seconds, perhaps with a fraction; `fallback_ns` when unset or no such number.
std::uint64_t duration_ns(const char* variable, std::uint64_t fallback_ns) noexcept;

}  // namespace dynamiccl
