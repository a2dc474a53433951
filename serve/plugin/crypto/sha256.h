// SHA-256 and HMAC over it, so that the plugin needs no cryptography library inside a training job.
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

/// Some bytes of a message that lies in several places.
struct Piece {
  const void* bytes;
  std::size_t size;
};

/// HMAC-SHA-256 (RFC 2104) of the pieces, one after the other. Nothing marks where a piece ends:
/// the caller's pieces have fixed sizes, or say their own.
void hmac_sha256(const std::uint8_t (&key)[kDigestBytes], const Piece* pieces, int num_pieces,
                 std::uint8_t mac[kDigestBytes]) noexcept;

/// Whether two areas are equal, in a time that does not tell where they differ.
bool equal_in_constant_time(const std::uint8_t* left, const std::uint8_t* right,
                            std::size_t size) noexcept;

/// Writes 2 * size lower-case digits and a NUL.
void to_hex(const std::uint8_t* bytes, std::size_t size, char* text) noexcept;

/// The SHA-256 of some bytes as text.
void sha256_hex(const void* bytes, std::size_t size, char (&text)[kHexBytes]) noexcept;

}  // namespace dynamiccl
