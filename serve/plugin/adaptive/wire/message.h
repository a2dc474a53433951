// What ranks tell each other: one flat struct for every kind of message, and its bytes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dynamiccl {

enum class MessageKind : std::uint8_t {
  kHello = 1,
  kRefuse,
  kPeers,
  kPropose,
  kVote,
  kDecision,
  kAcknowledge,
  kAsk,
  kAnswer,
  kDone,
  kSamples,
  kRegister,
  kLookup,
  kFound,
  kPoll,
  kReport,
};

/// A kind uses the fields it needs; the others keep their defaults.
struct Message {
  MessageKind kind;
  std::uint8_t verdict = 0;
  std::uint8_t reason = 0;
  std::int32_t rank = -1;  // -1: no rank in particular
  std::uint64_t comm_id = 0;
  std::uint32_t proposal = 0;
  std::uint64_t index = 0;
  std::uint64_t hash = 0;
  std::uint64_t span = 0;
  std::uint64_t fixed = 0;
  const std::uint8_t* body = nullptr;  // of a received message: valid during the callback
  std::uint32_t body_bytes = 0;
};

inline constexpr std::uint8_t kMessageVersion = 1;
inline constexpr std::size_t kMessageHeaderBytes = 56;
inline constexpr std::size_t kMaxBodyBytes = 48 * 1024;
inline constexpr std::size_t kMaxMessageBytes = kMessageHeaderBytes + kMaxBodyBytes;

/// Writes the message, little-endian; returns how many bytes it took. 0: it does not fit, or holds
/// what decode() would refuse.
std::size_t encode(const Message& message, std::uint8_t* out, std::size_t capacity) noexcept;

/// Reads a message that is exactly `size` bytes long; `body` then points into `bytes`. Every field
/// is checked, and each message has one encoding alone.
bool decode(const std::uint8_t* bytes, std::size_t size, Message* message) noexcept;

}  // namespace dynamiccl
