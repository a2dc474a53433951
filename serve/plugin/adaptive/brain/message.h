// The messages between a leader and a brain that is another process (serve/brain/protocol.py).
//
// Over a Unix stream socket: the leader asks, the brain answers, one at a time. Numbers are
// little-endian, floats IEEE 754 doubles, texts UTF-8 without a zero.
//
//     uint32    bytes that follow
//     char[8]   "DCBRAIN\0"
//     uint32    version, 1
//     uint32    kind: 1 ask, 2 table, 3 keep, 4 error
//     uint64    number of the question; the answer repeats it
//
// ask:    int32 num_nodes, int32 num_ranks
//         uint32 length, artifact directory;  uint32 length, system
//         uint32 length, table in force as a table file (0: NCCL's own choice everywhere)
//         uint32 number of tasks; each: int32 collective, int32 size bin, uint32 number of calls;
//           each call, oldest first: uint64 size_bytes, double time_us, double skew_us,
//           double interference, int8 algorithm, int8 protocol, int8 num_channels, uint8 number of
//           the call among the timed ones of its key, from 1 on, modulo 256 (0.1.0: always 0)
//         (unknown: skew_us, interference, algorithm and protocol -1; num_channels 0)
// table:  the whole next table as a table file (serve/table.py)
// keep:   nothing; the table in force stays
// error:  one line of text that says why there is no decision; the table in force stays
//
// Version history: 1, the first.
#pragma once

#include <cstddef>
#include <cstdint>

#include "adaptive/brain/brain_abi.h"
#include "vocabulary.h"

namespace dynamiccl {

/// Little-endian unsigned integer of `size` bytes at `bytes`, on any processor.
inline std::uint64_t read_unsigned(const std::uint8_t* bytes, std::size_t size) noexcept {
  std::uint64_t value = 0;
  for (std::size_t i = 0; i < size; ++i) value |= std::uint64_t{bytes[i]} << (8 * i);
  return value;
}

inline constexpr std::uint8_t kBrainMagic[] = {'D', 'C', 'B', 'R', 'A', 'I', 'N', 0};
inline constexpr std::uint32_t kBrainMessageVersion = 1;
enum BrainMessageKind : std::uint32_t {
  kBrainAsk = 1,
  kBrainTable = 2,
  kBrainKeep = 3,
  kBrainError = 4
};

inline constexpr std::size_t kBrainLengthBytes = 4;
inline constexpr std::size_t kBrainHeaderBytes = 24;  // after the length
inline constexpr std::size_t kMaxArtifactBytes = 4096;
inline constexpr std::size_t kMaxSystemBytes = 200;
inline constexpr std::size_t kMaxTasks = std::size_t{kNumCollectives} * kMaxBins;
inline constexpr std::size_t kAskTaskBytes = 12;
inline constexpr std::size_t kAskCallBytes = 36;
/// The longest question that exists: all task keys of a communicator with full windows.
inline constexpr std::size_t kMaxAskBytes =
    kBrainLengthBytes + kBrainHeaderBytes + 24 + kMaxArtifactBytes + kMaxSystemBytes +
    kMaxFileBytes + kMaxTasks * (kAskTaskBytes + DYNAMICCL_WINDOW * kAskCallBytes);
/// Of an answer without its length: a header and a table.
inline constexpr std::size_t kMaxAnswerBytes = kBrainHeaderBytes + kMaxFileBytes;

/// Write a question, with its length in front, into `buffer` of kMaxAskBytes. Returns its bytes; 0
/// for a history or config that no communicator has.
std::size_t write_ask(std::uint64_t number, const dynamiccl_brain_config& config,
                      const dynamiccl_history& history, std::uint8_t* buffer) noexcept;

/// An answer, pointing into the bytes that it was read from.
struct BrainAnswer {
  std::uint32_t kind;
  const std::uint8_t* body;
  std::size_t body_bytes;
};

/// Read the answer to question `number` from the bytes after its length. Returns null on success,
/// else what is wrong with it.
const char* read_answer(const std::uint8_t* bytes, std::size_t size, std::uint64_t number,
                        BrainAnswer* answer) noexcept;

}  // namespace dynamiccl
