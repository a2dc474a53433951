// SHA-256 as FIPS 180-4 writes it: plain arithmetic, the same on every processor.
#include "crypto/sha256.h"

#include <string.h>  // explicit_bzero

#include <algorithm>

namespace dynamiccl {
namespace {

// FIPS 180-4, 4.2.2: from the cube roots of the first 64 primes.
constexpr std::uint32_t kRounds[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};
// FIPS 180-4, 5.3.3: from the square roots of the first 8 primes.
constexpr std::uint32_t kStart[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                     0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

std::uint32_t rotate_right(std::uint32_t word, int bits) noexcept {
  return word >> bits | word << (32 - bits);
}

std::uint32_t read_big_endian(const std::uint8_t* bytes) noexcept {
  return std::uint32_t{bytes[0]} << 24 | std::uint32_t{bytes[1]} << 16 |
         std::uint32_t{bytes[2]} << 8 | std::uint32_t{bytes[3]};
}

void write_big_endian(std::uint64_t value, int size, std::uint8_t* bytes) noexcept {
  for (int i = 0; i < size; ++i) bytes[i] = static_cast<std::uint8_t>(value >> 8 * (size - 1 - i));
}

}  // namespace

Sha256::Sha256() noexcept { std::copy(kStart, kStart + 8, state_); }

void Sha256::compress(const std::uint8_t* block) noexcept {
  std::uint32_t words[64];
  for (int i = 0; i < 16; ++i) words[i] = read_big_endian(block + 4 * i);
  for (int i = 16; i < 64; ++i) {
    const std::uint32_t early = words[i - 15];
    const std::uint32_t late = words[i - 2];
    words[i] = words[i - 16] + words[i - 7] +
               (rotate_right(early, 7) ^ rotate_right(early, 18) ^ early >> 3) +
               (rotate_right(late, 17) ^ rotate_right(late, 19) ^ late >> 10);
  }
  std::uint32_t s[8];
  std::copy(state_, state_ + 8, s);
  for (int i = 0; i < 64; ++i) {
    const std::uint32_t first =
        s[7] + (rotate_right(s[4], 6) ^ rotate_right(s[4], 11) ^ rotate_right(s[4], 25)) +
        ((s[4] & s[5]) ^ (~s[4] & s[6])) + kRounds[i] + words[i];
    const std::uint32_t second =
        (rotate_right(s[0], 2) ^ rotate_right(s[0], 13) ^ rotate_right(s[0], 22)) +
        ((s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]));
    std::copy_backward(s, s + 7, s + 8);
    s[4] += first;
    s[0] = first + second;
  }
  for (int i = 0; i < 8; ++i) state_[i] += s[i];
}

void Sha256::update(const void* bytes, std::size_t size) noexcept {
  const auto* from = static_cast<const std::uint8_t*>(bytes);
  while (size != 0) {
    const std::size_t filled = size_bytes_ % kBlockBytes;
    const std::size_t taken = std::min(size, kBlockBytes - filled);
    if (taken == kBlockBytes) {
      compress(from);
    } else {
      std::copy(from, from + taken, block_ + filled);
      if (filled + taken == kBlockBytes) compress(block_);
    }
    size_bytes_ += taken;
    from += taken;
    size -= taken;
  }
}

void Sha256::finish(std::uint8_t digest[kDigestBytes]) noexcept {
  const std::uint64_t size_bits = size_bytes_ * 8;
  const std::size_t filled = size_bytes_ % kBlockBytes;
  std::uint8_t tail[kBlockBytes + 8] = {0x80};
  const std::size_t zeros_end = (filled < 56 ? 56 : kBlockBytes + 56) - filled;
  write_big_endian(size_bits, 8, tail + zeros_end);
  update(tail, zeros_end + 8);
  for (int i = 0; i < 8; ++i) write_big_endian(state_[i], 4, digest + 4 * i);
}

void to_hex(const std::uint8_t* bytes, std::size_t size, char* text) noexcept {
  for (std::size_t i = 0; i < size; ++i) {
    *text++ = "0123456789abcdef"[bytes[i] >> 4];
    *text++ = "0123456789abcdef"[bytes[i] & 15];
  }
  *text = '\0';
}

void sha256_hex(const void* bytes, std::size_t size, char (&text)[kHexBytes]) noexcept {
  Sha256 hash;
  std::uint8_t digest[kDigestBytes];
  hash.update(bytes, size);
  hash.finish(digest);
  to_hex(digest, sizeof digest, text);
}

}  // namespace dynamiccl
