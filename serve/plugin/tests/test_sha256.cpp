// The published vectors of SHA-256 and HMAC; tests/serve/test_sha256.py compares with hashlib.
#include <cstring>
#include <string>
#include <vector>

#include "crypto/sha256.h"
#include "tests/check.h"

using namespace dynamiccl;

namespace {

std::string hex(const std::uint8_t* bytes, std::size_t size) {
  std::vector<char> text(2 * size + 1);
  to_hex(bytes, size, text.data());
  return text.data();
}

std::string sha256(const std::string& message, std::size_t step) {
  Sha256 hash;
  for (std::size_t i = 0; i < message.size(); i += step) {
    hash.update(message.data() + i, std::min(step, message.size() - i));
  }
  std::uint8_t digest[kDigestBytes];
  hash.finish(digest);
  return hex(digest, sizeof digest);
}

/// A key of other length than ours: a short one ends with zeros, which HMAC puts there anyway, and
/// a long one is hashed, as HMAC does.
std::string hmac(const std::string& text, const std::string& message) {
  std::uint8_t key[kDigestBytes] = {};
  if (text.size() <= sizeof key) {
    std::memcpy(key, text.data(), text.size());
  } else {
    Sha256 hash;
    hash.update(text.data(), text.size());
    hash.finish(key);
  }
  std::uint8_t whole[kDigestBytes];
  const Piece piece = {message.data(), message.size()};
  hmac_sha256(key, &piece, 1, whole);
  const std::size_t half = message.size() / 2;
  std::uint8_t in_pieces[kDigestBytes];
  const Piece pieces[] = {
      {message.data(), half}, {nullptr, 0}, {message.data() + half, message.size() - half}};
  hmac_sha256(key, pieces, 3, in_pieces);
  CHECK(std::memcmp(whole, in_pieces, sizeof whole) == 0);
  return hex(whole, sizeof whole);
}

/// The examples of FIPS 180-4: NIST, "Cryptographic Standards and Guidelines: Examples with
/// Intermediate Values", SHA256.pdf; the million is FIPS 180-2, B.3.
void fips_180_4() {
  const struct {
    std::string message;
    const char* digest;
  } examples[] = {
      {"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
      {"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
      {"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
       "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"},
      {std::string(1'000'000, 'a'),
       "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"},
  };
  for (const auto& example : examples) {
    for (const std::size_t step : {1UL, 3UL, 63UL, 64UL, 65UL, 1'000'000UL}) {
      CHECK(sha256(example.message, step) == example.digest);
    }
  }
}

/// RFC 4231, 4.2 to 4.8 (test cases 1 to 7; case 5 is truncated to 128 bits).
void rfc_4231() {
  std::string ascending(25, '\0');
  for (char i = 0; i < 25; ++i) ascending[static_cast<std::size_t>(i)] = static_cast<char>(i + 1);
  CHECK(hmac(std::string(20, '\x0b'), "Hi There") ==
        "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  CHECK(hmac("Jefe", "what do ya want for nothing?") ==
        "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  CHECK(hmac(std::string(20, '\xaa'), std::string(50, '\xdd')) ==
        "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
  CHECK(hmac(ascending, std::string(50, '\xcd')) ==
        "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b");
  CHECK(hmac(std::string(20, '\x0c'), "Test With Truncation").substr(0, 32) ==
        "a3b6167473100ee06e0c796c2955552b");
  const std::string long_key(131, '\xaa');
  CHECK(hmac(long_key, "Test Using Larger Than Block-Size Key - Hash Key First") ==
        "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
  CHECK(hmac(long_key,
             "This is a test using a larger than block-size key and a larger than block-size data. "
             "The key needs to be hashed before being used by the HMAC algorithm.") ==
        "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2");
}

void comparison() {
  std::uint8_t left[32] = {};
  std::uint8_t right[32] = {};
  CHECK(equal_in_constant_time(left, right, 32) && equal_in_constant_time(left, right, 0));
  for (int bit = 0; bit < 256; ++bit) {
    right[bit / 8] = static_cast<std::uint8_t>(1 << bit % 8);
    CHECK(!equal_in_constant_time(left, right, 32));
    right[bit / 8] = 0;
  }
}

}  // namespace

int main() {
  fips_180_4();
  rfc_4231();
  comparison();
  return g_failures;
}
