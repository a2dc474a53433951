// The messages between a leader and a brain, which is another process: dynamiccl-brain (torch/), or
// Python (serve/brain/protocol.py).
//
// Over a Unix stream socket, one connection for each communicator: the leader asks, the brain
// answers, one at a time. Numbers are little-endian, floats IEEE 754 doubles, texts UTF-8 without a
// zero.
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
#include <string>
#include <vector>

#include "vocabulary.h"

namespace dynamiccl {

/// Little-endian unsigned integer of `size` bytes at `bytes`, on any processor.
inline std::uint64_t read_unsigned(const std::uint8_t* bytes, std::size_t size) noexcept {
  std::uint64_t value = 0;
  for (std::size_t i = 0; i < size; ++i) value |= std::uint64_t{bytes[i]} << (8 * i);
  return value;
}

/// Calls of one task that a brain sees (WINDOW_LENGTH of datasets/features.py).
inline constexpr std::size_t kWindow = 8;
inline constexpr std::size_t kMaxArtifactBytes = 4096;
inline constexpr std::size_t kMaxSystemBytes = 200;
inline constexpr std::size_t kBrainLengthBytes = 4;
/// Of any message without its length; the longest question that exists is shorter.
inline constexpr std::size_t kMaxBrainBytes = std::size_t{1} << 20;

struct TimedCall {
  std::uint64_t size_bytes = 0;  // NCCL's nBytes
  double time_us = 0.0;          // minimum over ranks, more than 0
  double skew_us = -1.0, interference = -1.0;
  std::int8_t algorithm = -1, protocol = -1, num_channels = 0;  // really used
};

/// One task key with timed calls. One that is not listed is decided as at the start of a job.
struct TimedTask {
  std::int32_t collective = 0;  // ncclFunc_t, 0 .. 4
  std::int32_t bin = 0;         // size bin (dynamiccl/sizes.py)
  /// Timed calls so far, of which `calls` are the last; as read: modulo 256. -1: not known.
  std::int64_t num_timed = -1;
  std::vector<TimedCall> calls;  // at most kWindow, the oldest first
};

struct BrainAsk {
  std::string artifact, system;  // its directory; as plugin.index names this machine
  std::uint32_t num_nodes = 0, num_ranks = 0;
  std::vector<std::uint8_t> table;  // in force; none: NCCL's own choice
  std::vector<TimedTask> tasks;
};

struct BrainAnswer {
  std::string problem;              // why there is no decision
  std::vector<std::uint8_t> table;  // none: keep the one in force
};

/// With its length in front.
std::string encode_ask(std::uint64_t number, const BrainAsk& ask);
std::string encode_answer(std::uint64_t number, const BrainAnswer& answer);

/// Of what follows the length. Null on success, else what is wrong with it.
const char* decode_ask(const std::string& bytes, std::uint64_t* number, BrainAsk* ask);
const char* decode_answer(const std::string& bytes, std::uint64_t number, BrainAnswer* answer);

}  // namespace dynamiccl
