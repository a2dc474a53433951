// What the ranks of a communicator and the arbiter say to each other, in `init` (round 0) and at a
// stop (the stop's number). One round on a connection of its own, which stays open, so that a rank
// that leaves is seen to leave:
//
//   rank                       arbiter
//   Vote                  ->   n equal votes, nobody gone, in time?    else Abstain, to all
//                         <-   StillThere: a question, drawn for this round
//   Confirm: its answer   ->   all confirmed?  into the log, and only then
//                         <-   Table
//
// Before it confirms a rank may abstain by itself, since nobody gets the table without its
// confirmation. After it only an answer frees it: a Recall asks, on a new connection each second.
// At a stop a body follows the vote, the times of calls since the last one, and "still there?"
// says what is proposed: nothing that could fail comes after the confirmation.
//
// All of it is under the installed key: SipHash-2-4 (Aumasson and Bernstein, 2012) over the
// message, its round and the rank's nonce; a confirmation holds the arbiter's question too. Who
// lacks the key, or repeats what it has heard, can at most make us abstain.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

namespace dynamiccl {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "numbers of messages are little-endian");

/// The first bytes of each message: "DCA3".
inline constexpr std::uint32_t kVoteMagic = 0x33414344;

/// What must be equal on all ranks, one digest each, so that the one that is not can be named.
inline constexpr std::size_t kNumFields = 8;
inline constexpr const char* kFieldNames[kNumFields] = {
    "plugin", "artifact", "table", "vendor's tuner", "NCCL", "shape", "machine", "settings"};

inline constexpr std::size_t kProblemBytes = 100;
/// Of what follows a vote or a proposal.
inline constexpr std::size_t kMostBodyBytes = 16'384;

/// A round of the votes of one communicator.
struct RoundKey {
  std::uint64_t job = 0;   // which run of which job: strangers and other restarts are turned away
  std::uint64_t comm = 0;  // NCCL's commHash
  std::uint64_t number = 0;
};

enum class VoteKind : std::uint8_t {
  kVote = 1,
  kConfirm,  // on the connection of the vote
  kRecall,   // a confirmation on a new connection: what became of this round?
};

struct Vote {
  std::uint32_t magic = kVoteMagic;
  std::uint32_t num_ranks = 0;
  RoundKey round;
  std::uint64_t nonce = 0;     // of this rank in this round, never 0
  std::uint64_t question = 0;  // in a confirmation or recall: the one that it answers
  std::uint64_t fields[kNumFields] = {};
  std::int32_t rank = -1;  // the launcher's number, for messages; -1: not known
  VoteKind kind = VoteKind::kVote;
  char problem[kProblemBytes] = "";  // why this rank cannot use a table; empty: it can
  bool has_stops = false;            // mode adaptive: it votes again, from inside calls
  std::uint8_t zero[2] = {};
  std::uint32_t body_bytes = 0;
  std::uint64_t body_digest = 0;
  std::uint64_t mac = 0;
};
static_assert(sizeof(Vote) == 240, "no gaps: it is sent as it lies in memory");

enum class ReplyKind : std::uint8_t {
  kStillThere = 1,
  kTable,
  kAbstain,
  kStranger,  // the arbiter of another job answers: it knows nothing of this round
};

/// What a decision changes.
enum class Change : std::uint8_t {
  kNothing,    // the table in force stays
  kOwnChoice,  // NCCL's own choice, everywhere
  kLastTable,  // the one that was in force before that
  kNewTable,   // the body, a table file
};

struct Reply {
  std::uint32_t magic = kVoteMagic;
  ReplyKind kind = ReplyKind::kAbstain;
  Change change = Change::kNothing;  // this and the last ones: of "still there?"
  char reason[kProblemBytes + 62] = "";
  std::uint64_t question = 0;
  std::uint64_t next_stop = 0;   // the next stop comes no earlier than at this call; 0: never
  std::uint64_t span_calls = 0;  // and how far apart stops are (stops.h)
  std::uint64_t body_digest = 0;
  std::uint32_t body_bytes = 0;
  std::uint32_t zero = 0;
  std::uint64_t mac = 0;
};
static_assert(sizeof(Reply) == 216, "no gaps: it is sent as it lies in memory");

enum class Verdict : std::uint8_t {
  kOpen,
  kTable,
  kAbstain,
  kFailed,  // it had confirmed and heard nothing for the answer limit: others may have the table
};

/// Time limits in milliseconds.
struct Limits {
  /// For all ranks to vote, from the first vote on, and 1 ms more for each rank (10,000 loads of a
  /// library from NFS).
  std::uint64_t vote_ms = 10'000;
  /// At a stop, from the first vote to the last confirmation. Ranks lose patience earlier; it frees
  /// those that have confirmed of one that is stopped, or on a lost machine.
  std::uint64_t stop_ms = 1'000;
  /// A rank's patience at a stop before it confirms, and up to 8 times that after failures.
  std::uint64_t patience_ms = 20;
  /// A rank that has confirmed asks again each second ...
  std::uint64_t ask_ms = 1'000;
  /// ... so long, which is also what stops and cuts of a round may last together.
  std::uint64_t answer_ms = 300'000;
};

/// Those of a job; in tests all but patience are to 10 s as DYNAMICCL_TEST_LIMIT_MS is.
inline Limits limits_of_job() noexcept {
  Limits limits;
#ifdef DYNAMICCL_TESTS
  if (const char* text = std::getenv("DYNAMICCL_TEST_LIMIT_MS")) {
    const std::uint64_t base = std::strtoull(text, nullptr, 10);
    for (auto limit : {&Limits::vote_ms, &Limits::stop_ms, &Limits::ask_ms, &Limits::answer_ms}) {
      limits.*limit = limits.*limit * base / 10'000;
    }
  }
#endif
  return limits;
}

inline constexpr std::uint64_t vote_limit_ms(const Limits& limits,
                                             std::uint32_t num_ranks) noexcept {
  return limits.vote_ms + std::uint64_t{num_ranks};
}

struct Key {
  std::uint64_t halves[2] = {};
};

/// SipHash-2-4 of `size` bytes.
inline std::uint64_t siphash(const Key& key, const void* bytes, std::size_t size) noexcept {
  const auto [low, high] = key.halves;
  std::uint64_t v[4] = {low ^ 0x736f6d6570736575U, high ^ 0x646f72616e646f6dU,
                        low ^ 0x6c7967656e657261U, high ^ 0x7465646279746573U};
  // v[add_to] += v[from], and v[from] is rotated and mixed with the sum.
  const auto mix = [&v](int add_to, int from, int bits) {
    v[add_to] += v[from];
    v[from] = (v[from] << bits | v[from] >> (64 - bits)) ^ v[add_to];
  };
  const auto rounds = [&v, &mix](int count) {
    for (int i = 0; i < count; ++i) {
      mix(0, 1, 13), mix(2, 3, 16);
      v[0] = v[0] << 32 | v[0] >> 32;
      mix(2, 1, 17), mix(0, 3, 21);
      v[2] = v[2] << 32 | v[2] >> 32;
    }
  };
  for (std::size_t at = 0; at <= size; at += 8) {
    std::uint64_t word = size - at < 8 ? std::uint64_t{size} << 56 : 0;
    if (size > 0) {
      std::memcpy(&word, static_cast<const char*>(bytes) + at, std::min<std::size_t>(8, size - at));
    }
    v[3] ^= word;
    rounds(2);
    v[0] ^= word;
  }
  v[2] ^= 0xff;
  rounds(4);
  return v[0] ^ v[1] ^ v[2] ^ v[3];
}

inline std::uint64_t mac_of(const Key& key, const Vote& vote) noexcept {
  return siphash(key, &vote, offsetof(Vote, mac));
}

/// Of a reply to the rank that sent `vote`.
inline std::uint64_t mac_of(const Key& key, const Reply& reply, const Vote& vote) noexcept {
  const std::uint64_t to[] = {vote.round.job, vote.round.comm, vote.round.number, vote.nonce};
  unsigned char bytes[offsetof(Reply, mac) + sizeof to];
  std::memcpy(bytes, &reply, offsetof(Reply, mac));
  std::memcpy(bytes + offsetof(Reply, mac), to, sizeof to);
  return siphash(key, bytes, sizeof bytes);
}

/// Whether received bytes are a reply under this key: known numbers, a zero-terminated text.
inline bool is_sound(const Key& key, const Reply& reply, const Vote& vote) noexcept {
  return reply.magic == kVoteMagic && reply.kind >= ReplyKind::kStillThere &&
         reply.kind <= ReplyKind::kStranger && reply.change <= Change::kNewTable &&
         reply.body_bytes <= kMostBodyBytes && reply.reason[sizeof reply.reason - 1] == '\0' &&
         reply.mac == mac_of(key, reply, vote);
}

}  // namespace dynamiccl
