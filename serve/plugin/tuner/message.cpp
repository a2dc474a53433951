// Little-endian numbers at fixed places, then the texts, each with its zero.
#include "tuner/message.h"

#include <cstring>

#include "platform/bytes.h"

namespace dynamiccl {
namespace {

constexpr std::uint8_t kVersion = 1;
constexpr std::size_t kRequestHead = 48;
constexpr std::size_t kAnswerHead = 24;

/// Appends a text and its zero; what follows `capacity` is cut.
std::size_t put_text(const char* text, std::size_t capacity, std::uint8_t* out) noexcept {
  const std::size_t length = strnlen(text, capacity - 1);
  std::memcpy(out, text, length);
  out[length] = 0;
  return length + 1;
}

/// Takes a text off the front; false where it has no zero or does not fit.
template <std::size_t capacity>
bool take_text(const std::uint8_t** bytes, std::size_t* size, char (&text)[capacity]) noexcept {
  const std::size_t most = *size < capacity ? *size : capacity;
  const void* end = std::memchr(*bytes, 0, most);
  if (end == nullptr) return false;
  const auto length = static_cast<std::size_t>(static_cast<const std::uint8_t*>(end) - *bytes) + 1;
  std::memcpy(text, *bytes, length);
  *bytes += length;
  *size -= length;
  return true;
}

}  // namespace

std::size_t encode(const Request& request, std::uint8_t (&out)[kMaxRequestBytes]) noexcept {
  write_unsigned(kVersion, 1, out);
  write_unsigned(static_cast<std::uint8_t>(request.kind), 1, out + 1);
  write_unsigned(request.ids_repeat ? 1 : 0, 2, out + 2);
  write_unsigned(request.num_ranks, 4, out + 4);
  write_unsigned(request.attempt, 8, out + 8);
  write_unsigned(request.incarnation, 8, out + 16);
  write_unsigned(request.comm_id, 8, out + 24);
  write_unsigned(request.nonce, 8, out + 32);
  write_unsigned(request.question, 8, out + 40);
  std::size_t size = kRequestHead;
  size += put_text(request.identity, kMaxIdentityBytes, out + size);
  return size + put_text(request.who, kMaxWhoBytes, out + size);
}

bool decode(const std::uint8_t* bytes, std::size_t size, Request* request) noexcept {
  if (size < kRequestHead || bytes[0] != kVersion || read_unsigned(bytes + 2, 2) > 1) return false;
  request->kind = static_cast<RequestKind>(bytes[1]);
  request->ids_repeat = bytes[2] != 0;
  request->num_ranks = static_cast<std::uint32_t>(read_unsigned(bytes + 4, 4));
  request->attempt = read_unsigned(bytes + 8, 8);
  request->incarnation = read_unsigned(bytes + 16, 8);
  request->comm_id = read_unsigned(bytes + 24, 8);
  request->nonce = read_unsigned(bytes + 32, 8);
  request->question = read_unsigned(bytes + 40, 8);
  bytes += kRequestHead;
  size -= kRequestHead;
  return request->kind >= RequestKind::kHello && request->kind <= RequestKind::kConfirm &&
         request->num_ranks >= 2 && request->nonce != 0 &&
         take_text(&bytes, &size, request->identity) && take_text(&bytes, &size, request->who) &&
         size == 0;
}

std::size_t encode(const Answer& answer, std::uint8_t (&out)[kMaxAnswerBytes]) noexcept {
  write_unsigned(kVersion, 1, out);
  write_unsigned(static_cast<std::uint8_t>(answer.kind), 1, out + 1);
  write_unsigned(0, 2, out + 2);
  write_unsigned(answer.wait_ms, 4, out + 4);
  write_unsigned(answer.incarnation, 8, out + 8);
  write_unsigned(answer.question, 8, out + 16);
  return kAnswerHead + put_text(answer.reason, kMaxReasonBytes, out + kAnswerHead);
}

bool decode(const std::uint8_t* bytes, std::size_t size, Answer* answer) noexcept {
  if (size < kAnswerHead || bytes[0] != kVersion || read_unsigned(bytes + 2, 2) != 0) return false;
  answer->kind = static_cast<AnswerKind>(bytes[1]);
  answer->wait_ms = static_cast<std::uint32_t>(read_unsigned(bytes + 4, 4));
  answer->incarnation = read_unsigned(bytes + 8, 8);
  answer->question = read_unsigned(bytes + 16, 8);
  bytes += kAnswerHead;
  size -= kAnswerHead;
  return answer->kind >= AnswerKind::kWelcome && answer->kind <= AnswerKind::kRetry &&
         take_text(&bytes, &size, answer->reason) && size == 0;
}

}  // namespace dynamiccl
