// What a pre-flight saw to be alike on all ranks, as one short word.
#pragma once

#include <cstddef>
#include <cstdint>

#include "crypto/sha256.h"

namespace dynamiccl {

inline constexpr std::size_t kPreflightBytes = 17;  // 16 digits and their end

/// Writes the word for this plugin's version, an artifact and a machine: the first half of the
/// SHA-256 of "<version>\n<hash in hexadecimal>\n<fingerprint>", in hexadecimal.
void preflight_word(const std::uint8_t artifact_hash[kDigestBytes], const char* fingerprint,
                    char (&word)[kPreflightBytes]) noexcept;

}  // namespace dynamiccl
