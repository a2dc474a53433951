// The recorder of this process: takes records from all communicators, writes calls files and feeds
// a sink.
// Its variables are read when a communicator comes, until the first files are begun.
#pragma once

#include <cstddef>
#include <cstdint>

#include "nccl/tuner_abi.h"

namespace dynamiccl {

/// Bits of CallRecord::flags.
inline constexpr std::uint8_t kFlagCaptured = 1;    // captured in a CUDA graph
inline constexpr std::uint8_t kFlagIncomplete = 2;  // some KernelCh events were lost: no GPU times
inline constexpr std::uint8_t kFlagProbe = 4;       // a probe of NCCL's own choice

/// A number that NCCL gave a name which is not in the vocabulary.
inline constexpr std::uint8_t kUnknown = 255;

/// One collective call on one rank.
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

/// It has a thread once calls files are asked for, until the process ends.
struct Recorder {
  using Sink = void (*)(const CallRecord& record);

  /// A communicator has come. Null, or why no calls files are written though they were asked for.
  /// Their headers say the sampled share, and of which NCCL `logger` is.
  static const char* acquire(std::uint32_t sample_ppm, ncclDebugLogger_t logger) noexcept;

  /// A communicator has gone. With the last one all is written, if that takes no more than 2 s.
  static void release() noexcept;

  /// Hand each record to `sink` as well, for good. It is called on the thread of the event, NCCL's
  /// proxy's among them; it must not block, nor call the recorder or a profiler.
  static void set_sink(Sink sink) noexcept;

  /// Whether anybody takes records. When not, they need not be made.
  static bool is_on() noexcept;

  /// From any thread; waits for no file.
  static void push(const CallRecord& record) noexcept;
};

}  // namespace dynamiccl
