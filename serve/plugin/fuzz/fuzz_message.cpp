// Messages: whatever decodes has its whole body in the bytes, and encodes to the same bytes again.
#include "adaptive/wire/message.h"
#include "fuzz/input.h"

using namespace dynamiccl;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
  Message message;
  if (!decode(bytes, size, &message)) return 0;
  REQUIRE(message.body_bytes <= kMaxBodyBytes && message.rank >= -1);
  REQUIRE((message.body == nullptr) == (message.body_bytes == 0));
  Bytes out(size);
  REQUIRE(encode(message, out.data(), out.size()) == size);
  REQUIRE(std::equal(out.begin(), out.end(), bytes));
  REQUIRE(encode(message, out.data(), out.size() - 1) == 0);
  return 0;
}
