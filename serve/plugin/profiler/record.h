// The record of one collective call on one rank.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dynamiccl {

/// Bits of CallRecord::flags.
inline constexpr std::uint8_t kFlagCaptured = 1;    // captured in a CUDA graph
inline constexpr std::uint8_t kFlagIncomplete = 2;  // some KernelCh events were lost: no GPU times
inline constexpr std::uint8_t kFlagProbe = 4;       // a probe of NCCL's own choice

/// A number that NCCL gave a name which is not in the vocabulary.
inline constexpr std::uint8_t kUnknown = 255;

struct CallRecord {
  std::uint64_t comm_id;      // commId, commHash before 2.28
  std::uint64_t sequence;     // NCCL's seqNumber: per communicator and collective
  std::uint64_t size_bytes;   // NCCL's nBytes, as a tuner gets it
  std::uint64_t enqueued_ns;  // CLOCK_REALTIME when NCCL began the event
  std::uint64_t start_ns;     // GPU globaltimer, least of all channels; 0: not sampled
  std::uint64_t stop_ns;      // largest of all channels; 0: not sampled
  std::int32_t rank;
  std::int32_t num_ranks;
  std::int32_t num_nodes;
  std::uint32_t table;  // number of the table in force; 0: NCCL's own choice everywhere
  std::uint8_t collective;
  std::uint8_t algorithm;
  std::uint8_t protocol;
  std::uint8_t num_channels;
  std::uint8_t num_warps;
  std::uint8_t datatype;  // ncclDataType_t
  std::uint8_t decided;   // 1: our table asked for this config, 0: NCCL's own
  std::uint8_t flags;
};
static_assert(sizeof(CallRecord) == 72 && offsetof(CallRecord, collective) == 64,
              "as in the calls files, byte for byte");

}  // namespace dynamiccl
