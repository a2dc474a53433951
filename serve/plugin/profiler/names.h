// NCCL's spellings in profiler events, as the numbers of the vocabulary.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dynamiccl {

/// `ncclFunc_t`; kUnknown for what no tuner is asked about.
std::uint8_t collective_of(const char* name) noexcept;

/// Index in NCCL's cost table; kUnknown for a new one.
std::uint8_t algorithm_of(const char* name) noexcept;
std::uint8_t protocol_of(const char* name) noexcept;

/// `ncclDataType_t`; kUnknown for a new one.
std::uint8_t datatype_of(const char* name) noexcept;

/// Bytes of one element; 0 for kUnknown.
std::size_t element_bytes(std::uint8_t datatype) noexcept;

}  // namespace dynamiccl
