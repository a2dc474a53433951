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

/// Plain numbers in one allocation, read-only once loaded.
struct Schedule {
  Schedule() = default;
  ~Schedule() { std::free(memory); }
  Schedule(const Schedule&) = delete;
  Schedule& operator=(const Schedule&) = delete;

  std::int32_t num_nodes = 0;
  std::int32_t num_ranks = 0;
  std::int32_t collective = 0;
  std::int32_t halves = 0;  // out-of-place and in-place
  std::int32_t calls_per_half = 0;
  std::int32_t num_warmup_runs = 0;
  std::int32_t num_sizes = 0;
  std::int32_t num_configs = 0;
  std::int32_t num_blocks = 0;
  std::uint64_t checksum = 0;
  bool sets_chunks = false;  // some config has a chunk size

  const WarmupRun* warmup = nullptr;
  const std::uint64_t* sizes = nullptr;
  const Entry* configs = nullptr;
  const std::uint16_t* blocks = nullptr;  // [cycle][num_sizes], each an index into configs

  void* memory = nullptr;  // holds the four above
};

/// Decode a schedule file's bytes. Returns null on success, else why it must not be played; every
/// number is checked, as in decode_table. `schedule` must be fresh.
const char* decode_schedule(const std::uint8_t* bytes, std::size_t size,
                            Schedule* schedule) noexcept;

/// Read and decode the file at `path`. Returns null on success, else why not.
const char* load_schedule(const char* path, Schedule* schedule) noexcept;

}  // namespace dynamiccl
