// The schedule of sweep mode in memory. The file format is dynamiccl/schedule.py's; every byte of a
// file is checked once, at load, and playing then trusts it.
#pragma once

#include <cstring>

#include "file.h"
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

  bool is_sound() const noexcept {
    const auto within = [](std::int64_t value, std::int64_t low, std::int64_t high) {
      return value >= low && value <= high;
    };
    return num_nodes >= 1 && num_ranks >= num_nodes && within(collective, 0, kNumCollectives - 1) &&
           within(halves, 1, 2) && within(calls_per_half, 1, kMaxCalls) &&
           within(num_warmup_runs, 0, kMaxWarmupRuns) && within(num_sizes, 1, kMaxSizes) &&
           within(num_cycles, 1, kMaxBlocks / num_sizes) && within(num_configs, 1, kMaxConfigs);
  }
};
static_assert(sizeof(ScheduleHeader) == kScheduleHeaderBytes && sizeof(WarmupRun) == 16,
              "the file's, byte for byte");

/// A view of a file's bytes, which must outlive it.
struct Schedule : ScheduleHeader {
  std::int32_t num_blocks;
  std::uint64_t checksum;
  // In this order in the file, largest alignment first.
  const WarmupRun* warmup;
  const std::uint64_t* sizes;
  const Entry* configs;
  const std::uint16_t* blocks;  // [cycle][num_sizes], each an index into configs
};

/// Decode a schedule file's bytes, which lie as malloc places them. Returns null on success, else
/// why it must not be played; every number is checked, as in decode_table.
inline const char* decode_schedule(const std::uint8_t* bytes, std::size_t size,
                                   Schedule* schedule) noexcept {
  if (size < kScheduleHeaderBytes + kChecksumBytes) return "it is too short";
  std::memcpy(static_cast<ScheduleHeader*>(schedule), bytes, kScheduleHeaderBytes);
  if (std::memcmp(schedule->magic, kScheduleMagic, sizeof kScheduleMagic) != 0) {
    return "it is not a DynamICCL schedule";
  }
  if (schedule->version != kScheduleVersion) return "its format version is another";
  if (!schedule->is_sound()) return "a number in its header is out of range";
  schedule->num_blocks = schedule->num_cycles * schedule->num_sizes;
  const std::size_t sizes_at = kScheduleHeaderBytes + sizeof(WarmupRun) * schedule->num_warmup_runs;
  const std::size_t configs_at = sizes_at + sizeof(std::uint64_t) * schedule->num_sizes;
  const std::size_t blocks_at = configs_at + sizeof(Entry) * schedule->num_configs;
  const std::size_t end = blocks_at + sizeof(std::uint16_t) * schedule->num_blocks;
  if (size != end + kChecksumBytes) return "its length does not fit its header";
  std::memcpy(&schedule->checksum, bytes + end, kChecksumBytes);
  if (schedule->checksum != fnv1a(bytes, end)) return "its checksum does not match";
  schedule->warmup = reinterpret_cast<const WarmupRun*>(bytes + kScheduleHeaderBytes);
  schedule->sizes = reinterpret_cast<const std::uint64_t*>(bytes + sizes_at);
  schedule->configs = reinterpret_cast<const Entry*>(bytes + configs_at);
  schedule->blocks = reinterpret_cast<const std::uint16_t*>(bytes + blocks_at);
  for (std::int32_t i = 0; i < schedule->num_warmup_runs; ++i) {
    const WarmupRun& run = schedule->warmup[i];
    if (size_bin(run.size_bytes) < 0 || run.num_calls == 0 || run.num_calls > kMaxCalls) {
      return "a warm-up run is out of range";
    }
  }
  for (std::int32_t i = 0; i < schedule->num_sizes; ++i) {
    if (size_bin(schedule->sizes[i]) < 0) return "a size is out of range";
  }
  for (std::int32_t i = 0; i < schedule->num_configs; ++i) {
    if (!entry_is_sound(schedule->collective, schedule->configs[i])) {
      return "a config is outside the vocabulary";
    }
  }
  for (std::int32_t i = 0; i < schedule->num_blocks; ++i) {
    if (schedule->blocks[i] >= schedule->num_configs) return "a block has no config";
  }
  return nullptr;
}

}  // namespace dynamiccl
