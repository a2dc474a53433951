// Prints SHA-256 and HMAC for tests/serve/test_sha256.py: reads lines of "key message step", in
// hexadecimal ("-" is empty), the message to be hashed in pieces of `step` bytes.
#include <algorithm>
#include <cstdio>
#include <iostream>
#include <string>
#include <vector>

#include "crypto/sha256.h"

using namespace dynamiccl;

int main() {
  std::string key_text;
  std::string message_text;
  std::size_t step = 0;
  while (std::cin >> key_text >> message_text >> step) {
    if (key_text == "-") key_text.clear();
    if (message_text == "-") message_text.clear();
    std::vector<std::uint8_t> key(key_text.size() / 2);
    std::vector<std::uint8_t> message(message_text.size() / 2);
    if (!from_hex(key_text.data(), key_text.size(), key.data(), key.size()) ||
        !from_hex(message_text.data(), message_text.size(), message.data(), message.size())) {
      return 1;
    }
    Sha256 hash;
    std::vector<Piece> pieces;
    for (std::size_t i = 0; i < message.size(); i += step) {
      pieces.push_back({message.data() + i, std::min(step, message.size() - i)});
      hash.update(pieces.back().bytes, pieces.back().size);
    }
    std::uint8_t digest[kDigestBytes];
    std::uint8_t mac[kDigestBytes];
    hash.finish(digest);
    hmac_sha256(key.data(), key.size(), pieces.data(), static_cast<int>(pieces.size()), mac);
    char digest_text[2 * kDigestBytes + 1];
    char mac_text[2 * kDigestBytes + 1];
    to_hex(digest, sizeof digest, digest_text);
    to_hex(mac, sizeof mac, mac_text);
    std::printf("%s %s\n", digest_text, mac_text);
  }
  return 0;
}
