// Messages and their bytes: what goes in comes out, and bytes that are wrong anywhere do not.
#include <cstring>
#include <random>
#include <vector>

#include "adaptive/wire/message.h"
#include "tests/check.h"

using namespace dynamiccl;

namespace {

using Bytes = std::vector<std::uint8_t>;

bool equal(const Message& left, const Message& right) {
  return left.kind == right.kind && left.verdict == right.verdict && left.reason == right.reason &&
         left.rank == right.rank && left.comm_id == right.comm_id &&
         left.proposal == right.proposal && left.index == right.index && left.hash == right.hash &&
         left.span == right.span && left.fixed == right.fixed &&
         left.body_bytes == right.body_bytes &&
         (left.body_bytes == 0 || std::memcmp(left.body, right.body, left.body_bytes) == 0);
}

Bytes encoded(const Message& message) {
  Bytes bytes(kMaxMessageBytes);
  bytes.resize(encode(message, bytes.data(), bytes.size()));
  return bytes;
}

/// On the heap and exactly as long, so that AddressSanitizer sees every read beyond.
bool decodes(const Bytes& bytes, Message* message) {
  return decode(bytes.data(), bytes.size(), message);
}

void layout() {
  const std::uint8_t body[] = {0xaa, 0xbb};
  Message message;
  message.kind = MessageKind::kVote;
  message.verdict = 2;
  message.reason = 3;
  message.rank = 0x04050607;
  message.comm_id = 0x0102030405060708;
  message.proposal = 0x11121314;
  message.index = 0x2122232425262728;
  message.hash = 0x3132333435363738;
  message.span = 0x4142434445464748;
  message.fixed = 0x5152535455565758;
  message.body = body;
  message.body_bytes = 2;
  const Bytes expected = {1,    5,    2,    3,     // version, kind, verdict, reason
                          0x07, 0x06, 0x05, 0x04,  // rank
                          0x08, 0x07, 0x06, 0x05, 0x04, 0x03, 0x02, 0x01, 0x14, 0x13,
                          0x12, 0x11, 2,    0,    0,    0,    0x28, 0x27, 0x26, 0x25,
                          0x24, 0x23, 0x22, 0x21, 0x38, 0x37, 0x36, 0x35, 0x34, 0x33,
                          0x32, 0x31, 0x48, 0x47, 0x46, 0x45, 0x44, 0x43, 0x42, 0x41,
                          0x58, 0x57, 0x56, 0x55, 0x54, 0x53, 0x52, 0x51, 0xaa, 0xbb};
  CHECK(encoded(message) == expected);
  Message back;
  CHECK(decodes(expected, &back) && equal(message, back));
}

void round_trips() {
  std::mt19937_64 random(3);
  for (int i = 0; i < 20'000; ++i) {
    Bytes body(i % 100 == 0 ? kMaxBodyBytes - random() % 3 : random() % 50);
    for (std::uint8_t& byte : body) byte = static_cast<std::uint8_t>(random());
    Message message;
    message.kind = static_cast<MessageKind>(1 + random() % 16);
    message.verdict = static_cast<std::uint8_t>(random());
    message.reason = static_cast<std::uint8_t>(random());
    message.rank = static_cast<std::int32_t>(random() % (1ULL << 31)) - static_cast<int>(i % 2);
    message.comm_id = random();
    message.proposal = static_cast<std::uint32_t>(random());
    message.index = random();
    message.hash = random();
    message.span = random();
    message.fixed = random();
    message.body = body.data();
    message.body_bytes = static_cast<std::uint32_t>(body.size());
    const Bytes bytes = encoded(message);
    Message back;
    CHECK(bytes.size() == kMessageHeaderBytes + body.size());
    CHECK(decodes(bytes, &back) && equal(message, back) && encoded(back) == bytes);
    CHECK((back.body == nullptr) == body.empty());
  }
}

void refused() {
  std::uint8_t body[4] = {};
  Message message;
  message.kind = MessageKind::kHello;
  message.body = body;
  message.body_bytes = sizeof body;
  const Bytes good = encoded(message);
  Message back;
  for (std::size_t size = 0; size < good.size(); ++size) {
    CHECK(!decodes(Bytes(good.begin(), good.begin() + static_cast<std::ptrdiff_t>(size)), &back));
    Bytes room(size);
    CHECK(encode(message, room.data(), size) == 0);
  }
  Bytes longer = good;
  longer.push_back(0);
  CHECK(!decodes(longer, &back));
  const auto refuses = [&good, &back](std::size_t offset, std::uint8_t value) {
    Bytes bad = good;
    bad[offset] = value;
    return !decodes(bad, &back);
  };
  CHECK(refuses(0, 0) && refuses(0, 2));                                           // version
  CHECK(refuses(1, 0) && refuses(1, 17) && refuses(1, 255));                       // kind
  CHECK(refuses(7, 0x80) && refuses(4, 0xfe));                                     // rank
  CHECK(refuses(20, 3) && refuses(20, 5) && refuses(22, 1) && refuses(23, 0xff));  // body_bytes
  for (std::size_t bit = 0; bit < 8 * good.size(); ++bit) {
    Bytes flipped = good;
    flipped[bit / 8] ^= static_cast<std::uint8_t>(1 << bit % 8);
    if (decodes(flipped, &back)) CHECK(encoded(back) == flipped);
  }
}

void unsound_is_not_encoded() {
  std::uint8_t out[256];
  Message good;
  good.kind = MessageKind::kDone;
  CHECK(encode(good, out, sizeof out) == kMessageHeaderBytes);
  Message bad = good;
  bad.kind = static_cast<MessageKind>(0);
  CHECK(encode(bad, out, sizeof out) == 0);
  bad.kind = static_cast<MessageKind>(17);
  CHECK(encode(bad, out, sizeof out) == 0);
  bad = good;
  bad.rank = -2;
  CHECK(encode(bad, out, sizeof out) == 0);
  bad = good;
  bad.body_bytes = 1;  // and no body
  CHECK(encode(bad, out, sizeof out) == 0);
  const Bytes large(kMaxBodyBytes + 1);
  Bytes room(2 * kMaxBodyBytes);
  bad.body = large.data();
  bad.body_bytes = static_cast<std::uint32_t>(large.size());
  CHECK(encode(bad, room.data(), room.size()) == 0);
  bad.body_bytes = 0xffffffff;
  CHECK(encode(bad, room.data(), room.size()) == 0);
}

}  // namespace

int main() {
  layout();
  round_trips();
  refused();
  unsound_is_not_encoded();
  return g_failures;
}
