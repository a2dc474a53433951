// What a rank and the coordinator say to each other: one request, one answer, then the connection
// is closed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dynamiccl {

/// The rank's lines `name=value`, which all ranks must have in common, and who it is.
inline constexpr std::size_t kMaxIdentityBytes = 1024;
inline constexpr std::size_t kMaxWhoBytes = 160;
inline constexpr std::size_t kMaxReasonBytes = 512;

enum class RequestKind : std::uint8_t { kHello = 1, kVote, kConfirm };

struct Request {
  RequestKind kind = RequestKind::kHello;
  bool ids_repeat = false;  // in a vote: this process saw a shrink (agree.h)
  std::uint32_t num_ranks = 0;
  std::uint64_t attempt = 0;      // which run of which job
  std::uint64_t incarnation = 0;  // of the coordinator that is asked; 0 in a hello
  std::uint64_t comm_id = 0;
  std::uint64_t nonce = 0;     // of this init, drawn anew for each
  std::uint64_t question = 0;  // in a confirm: which "still here?" it answers
  // In a vote: ends with a zero each.
  char identity[kMaxIdentityBytes] = "";
  char who[kMaxWhoBytes] = "";
};

enum class AnswerKind : std::uint8_t {
  kWelcome = 1,  // to a hello: the incarnation
  kWait,         // ask again in wait_ms
  kStillHere,    // all have voted alike: confirm `question`
  kTable,        // the table, from call 0
  kAbstain,      // NCCL's own choice, for `reason`
  kRetry,        // another attempt of the job, or another coordinator, is meant
};

struct Answer {
  AnswerKind kind = AnswerKind::kRetry;
  std::uint32_t wait_ms = 0;
  std::uint64_t incarnation = 0;
  std::uint64_t question = 0;
  char reason[kMaxReasonBytes] = "";
};

inline constexpr std::size_t kMaxRequestBytes = 48 + kMaxIdentityBytes + kMaxWhoBytes;
inline constexpr std::size_t kMaxAnswerBytes = 24 + kMaxReasonBytes;

/// Writes a message and returns its length; the texts are cut where they are too long.
std::size_t encode(const Request& request, std::uint8_t (&out)[kMaxRequestBytes]) noexcept;
std::size_t encode(const Answer& answer, std::uint8_t (&out)[kMaxAnswerBytes]) noexcept;

/// Reads a message; false for anything that encode() does not write.
bool decode(const std::uint8_t* bytes, std::size_t size, Request* request) noexcept;
bool decode(const std::uint8_t* bytes, std::size_t size, Answer* answer) noexcept;

}  // namespace dynamiccl
