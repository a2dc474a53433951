// Messages between a rank and the coordinator: one request and one answer on each connection. Both
// are sent as they lie in memory, with all padding zeroed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dynamiccl {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "numbers of messages are little-endian");

/// The rank's `name=value` lines, which must be equal on all ranks, and its name for messages.
inline constexpr std::size_t kMaxIdentityBytes = 1024;
inline constexpr std::size_t kMaxWhoBytes = 158;
inline constexpr std::size_t kMaxReasonBytes = 511;

/// The first bytes of each message: "DCA2".
inline constexpr std::uint32_t kMessageMagic = 0x32414344;

enum class RequestKind : std::uint8_t { kHello = 1, kVote, kConfirm };

struct Request {
  std::uint32_t magic = kMessageMagic;
  std::uint32_t num_ranks = 0;
  std::uint64_t attempt = 0;      // which run of which job
  std::uint64_t incarnation = 0;  // of the coordinator that is asked; 0 in a hello
  std::uint64_t comm_id = 0;
  std::uint64_t nonce = 0;     // of this init, drawn anew for each
  std::uint64_t question = 0;  // in a confirm: which "still here?" it answers
  RequestKind kind = RequestKind::kHello;
  std::uint8_t ids_repeat = 0;  // 1 in a vote: this process saw a shrink (note_id)
  // Set in a vote: zero-terminated.
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
  std::uint32_t magic = kMessageMagic;
  std::uint32_t wait_ms = 0;
  std::uint64_t incarnation = 0;
  std::uint64_t question = 0;
  AnswerKind kind = AnswerKind::kRetry;
  char reason[kMaxReasonBytes] = "";
};

static_assert(sizeof(Request) == 50 + kMaxIdentityBytes + kMaxWhoBytes, "no gaps");
static_assert(sizeof(Answer) == 25 + kMaxReasonBytes, "no gaps");

/// Whether received bytes are a valid message: known numbers, zero-terminated texts.
inline bool is_sound(const Request& request) noexcept {
  return request.magic == kMessageMagic && request.kind >= RequestKind::kHello &&
         request.kind <= RequestKind::kConfirm && request.ids_repeat <= 1 &&
         request.num_ranks >= 2 && request.nonce != 0 &&
         request.identity[kMaxIdentityBytes - 1] == 0 && request.who[kMaxWhoBytes - 1] == 0;
}
inline bool is_sound(const Answer& answer) noexcept {
  return answer.magic == kMessageMagic && answer.kind >= AnswerKind::kWelcome &&
         answer.kind <= AnswerKind::kRetry && answer.reason[kMaxReasonBytes - 1] == 0;
}

}  // namespace dynamiccl
