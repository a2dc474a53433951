// What tests/serve compares with Python's: `bins` of the sizes on stdin; `hashes`, SHA-256 of lines
// "message step", the message in hexadecimal ("-" is empty), to be hashed in pieces of `step`
// bytes.
#include <algorithm>
#include <cstdio>
#include <iostream>
#include <string>
#include <vector>

#include "crypto/sha256.h"
#include "table.h"

using namespace dynamiccl;

void print_hash(const std::string& digits, std::size_t step) {
  std::vector<std::uint8_t> message;
  for (std::size_t i = 0; i + 1 < digits.size(); i += 2) {
    message.push_back(static_cast<std::uint8_t>(std::stoi(digits.substr(i, 2), nullptr, 16)));
  }
  Sha256 hash;
  for (std::size_t i = 0; i < message.size(); i += step) {
    hash.update(message.data() + i, std::min(step, message.size() - i));
  }
  std::uint8_t digest[kDigestBytes];
  hash.finish(digest);
  char text[kHexBytes];
  to_hex(digest, sizeof digest, text);
  std::puts(text);
}

int main(int, char** arguments) {
  std::string digits;
  std::uint64_t number = 0;
  if (std::string(arguments[1]) == "bins") {
    while (std::cin >> number) std::printf("%d\n", size_bin(number));
  } else {
    while (std::cin >> digits >> number) print_hash(digits == "-" ? "" : digits, number);
  }
  return 0;
}
