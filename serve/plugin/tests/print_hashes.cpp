// Prints SHA-256 and HMAC for tests/serve/test_sha256.py: reads lines of "key message step", in
// hexadecimal ("-" is empty), the message to be hashed in pieces of `step` bytes.
#include <algorithm>
#include <cstdio>
#include <iostream>
#include <string>
#include <vector>

#include "crypto/sha256.h"

using namespace dynamiccl;

std::vector<std::uint8_t> bytes_of(const std::string& digits) {
  std::vector<std::uint8_t> bytes;
  for (std::size_t i = 0; i + 1 < digits.size(); i += 2) {
    bytes.push_back(static_cast<std::uint8_t>(std::stoi(digits.substr(i, 2), nullptr, 16)));
  }
  return bytes;
}

int main() {
  std::string key_text;
  std::string message_text;
  std::size_t step = 0;
  while (std::cin >> key_text >> message_text >> step) {
    if (message_text == "-") message_text.clear();
    std::uint8_t key[kDigestBytes];
    const std::vector<std::uint8_t> key_bytes = bytes_of(key_text);
    if (key_bytes.size() != sizeof key) return 1;
    std::copy(key_bytes.begin(), key_bytes.end(), key);
    const std::vector<std::uint8_t> message = bytes_of(message_text);
    Sha256 hash;
    std::vector<Piece> pieces;
    for (std::size_t i = 0; i < message.size(); i += step) {
      pieces.push_back({message.data() + i, std::min(step, message.size() - i)});
      hash.update(pieces.back().bytes, pieces.back().size);
    }
    std::uint8_t digest[kDigestBytes];
    std::uint8_t mac[kDigestBytes];
    hash.finish(digest);
    hmac_sha256(key, pieces.data(), static_cast<int>(pieces.size()), mac);
    char digest_text[2 * kDigestBytes + 1];
    char mac_text[2 * kDigestBytes + 1];
    to_hex(digest, sizeof digest, digest_text);
    to_hex(mac, sizeof mac, mac_text);
    std::printf("%s %s\n", digest_text, mac_text);
  }
  return 0;
}
