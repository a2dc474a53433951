// The schedule of sweep mode in memory. The file format is dynamiccl/schedule.py's.
#pragma once

#include <cstdlib>

#include "table.h"

namespace dynamiccl {

/// So many equal calls before the first block, which get NCCL's own choice.
struct WarmupRun {
  std::uint64_t size_bytes;
  std::uint64_t num_calls;
};

/// The file's first bytes.
struct ScheduleHeader {
  std::uint8_t magic[8];
  std::uint32_t version;
  std::int32_t num_nodes;
  std::int32_t num_ranks;
  std::int32_t collective;
  std::int32_t halves;  // out-of-place and in-place
  std::int32_t calls_per_half;
  std::int32_t num_warmup_runs;
  std::int32_t num_sizes;
  std::int32_t num_cycles;
  std::int32_t num_configs;
};
static_assert(sizeof(ScheduleHeader) == kScheduleHeaderBytes && sizeof(WarmupRun) == 16 &&
                  sizeof(Entry) == 8,
              "the file's, byte for byte");
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the file's numbers are little-endian");

/// A file whose every number was checked once, at load; read-only from then on.
struct Schedule : ScheduleHeader {
  Schedule() = default;
  ~Schedule() { std::free(bytes); }
  Schedule(const Schedule&) = delete;
  Schedule& operator=(const Schedule&) = delete;

  std::int32_t num_blocks = 0;
  std::uint64_t checksum = 0;
  bool sets_chunks = false;  // some config has a chunk size

  // In this order in the file, largest alignment first.
  const WarmupRun* warmup = nullptr;
  const std::uint64_t* sizes = nullptr;
  const Entry* configs = nullptr;
  const std::uint16_t* blocks = nullptr;  // [cycle][num_sizes], each an index into configs

  std::uint8_t* bytes = nullptr;  // of the file; holds the four above
};

/// Decode a schedule file's bytes. Returns null on success, else why it must not be played; every
/// number is checked, as in decode_table. `schedule` must be fresh.
const char* decode_schedule(const std::uint8_t* bytes, std::size_t size,
                            Schedule* schedule) noexcept;

/// Read and decode the file at `path`. Returns null on success, else why not.
const char* load_schedule(const char* path, Schedule* schedule) noexcept;

}  // namespace dynamiccl
