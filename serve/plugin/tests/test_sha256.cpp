// The published vectors of SHA-256; tests/serve/test_sha256.py compares with hashlib.
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

}  // namespace

int main() {
  fips_180_4();
  return g_failures;
}
