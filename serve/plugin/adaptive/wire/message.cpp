// The layout: version, kind, verdict, reason; rank; comm_id; proposal; body_bytes; index, hash,
// span, fixed; then the body.
#include "adaptive/wire/message.h"

#include <algorithm>

#include "platform/bytes.h"

namespace dynamiccl {
namespace {

bool is_sound(const Message& message) noexcept {
  return message.kind >= MessageKind::kHello && message.kind <= MessageKind::kReport &&
         message.rank >= -1 && message.body_bytes <= kMaxBodyBytes;
}

}  // namespace

std::size_t encode(const Message& message, std::uint8_t* out, std::size_t capacity) noexcept {
  if (!is_sound(message) || (message.body == nullptr && message.body_bytes != 0)) return 0;
  const std::size_t size = kMessageHeaderBytes + message.body_bytes;
  if (size > capacity) return 0;
  *out++ = kMessageVersion;
  *out++ = static_cast<std::uint8_t>(message.kind);
  *out++ = message.verdict;
  *out++ = message.reason;
  out = write_unsigned(static_cast<std::uint32_t>(message.rank), 4, out);
  out = write_unsigned(message.comm_id, 8, out);
  out = write_unsigned(message.proposal, 4, out);
  out = write_unsigned(message.body_bytes, 4, out);
  for (const std::uint64_t number : {message.index, message.hash, message.span, message.fixed}) {
    out = write_unsigned(number, 8, out);
  }
  if (message.body_bytes != 0) std::copy(message.body, message.body + message.body_bytes, out);
  return size;
}

bool decode(const std::uint8_t* bytes, std::size_t size, Message* message) noexcept {
  if (size < kMessageHeaderBytes || bytes[0] != kMessageVersion) return false;
  message->kind = static_cast<MessageKind>(bytes[1]);
  message->verdict = bytes[2];
  message->reason = bytes[3];
  message->rank = read_int32(bytes + 4);
  message->comm_id = read_unsigned(bytes + 8, 8);
  message->proposal = static_cast<std::uint32_t>(read_unsigned(bytes + 16, 4));
  message->body_bytes = static_cast<std::uint32_t>(read_unsigned(bytes + 20, 4));
  message->index = read_unsigned(bytes + 24, 8);
  message->hash = read_unsigned(bytes + 32, 8);
  message->span = read_unsigned(bytes + 40, 8);
  message->fixed = read_unsigned(bytes + 48, 8);
  message->body = message->body_bytes != 0 ? bytes + kMessageHeaderBytes : nullptr;
  return is_sound(*message) && size == kMessageHeaderBytes + message->body_bytes;
}

}  // namespace dynamiccl
