// Prints SHA-256 for tests/serve/test_sha256.py: reads lines of "message step", the message in
// hexadecimal ("-" is empty), to be hashed in pieces of `step` bytes.
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
  std::string message_text;
  std::size_t step = 0;
  while (std::cin >> message_text >> step) {
    if (message_text == "-") message_text.clear();
    const std::vector<std::uint8_t> message = bytes_of(message_text);
    Sha256 hash;
    for (std::size_t i = 0; i < message.size(); i += step) {
      hash.update(message.data() + i, std::min(step, message.size() - i));
    }
    std::uint8_t digest[kDigestBytes];
    hash.finish(digest);
    char text[2 * kDigestBytes + 1];
    to_hex(digest, sizeof digest, text);
    std::puts(text);
  }
  return 0;
}
