// SHA-256, so that what is started beside a job needs no cryptography library.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dynamiccl {

inline constexpr std::size_t kDigestBytes = 32;
inline constexpr std::size_t kHexBytes = 2 * kDigestBytes + 1;  // of a digest as text, and its end

/// SHA-256 (FIPS 180-4) of bytes that come in pieces.
class Sha256 {
 public:
  Sha256() noexcept;

  void update(const void* bytes, std::size_t size) noexcept;

  /// Writes the digest. The object is then used up.
  void finish(std::uint8_t digest[kDigestBytes]) noexcept;

 private:
  static constexpr std::size_t kBlockBytes = 64;

  void compress(const std::uint8_t* block) noexcept;

  std::uint32_t state_[8];
  std::uint64_t size_bytes_ = 0;
  std::uint8_t block_[kBlockBytes];  // the first size_bytes_ % kBlockBytes of it are filled
};

/// Writes 2 * size lower-case digits and a NUL.
void to_hex(const std::uint8_t* bytes, std::size_t size, char* text) noexcept;

/// The SHA-256 of some bytes as text.
void sha256_hex(const void* bytes, std::size_t size, char (&text)[kHexBytes]) noexcept;

}  // namespace dynamiccl
