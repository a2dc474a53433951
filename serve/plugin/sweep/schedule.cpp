// Every byte of a schedule file is checked once, at load; playing then trusts it.
#include "sweep/schedule.h"

#include <cstring>

#include "file.h"

namespace dynamiccl {
namespace {

bool within(std::int64_t value, std::int64_t low, std::int64_t high) noexcept {
  return value >= low && value <= high;
}

bool is_size(std::uint64_t size_bytes) noexcept {
  return size_bytes != 0 && size_bytes >> kMaxSizeBits == 0;
}

bool is_sound(const ScheduleHeader& header) noexcept {
  return header.num_nodes >= 1 && header.num_ranks >= header.num_nodes &&
         within(header.collective, 0, kNumCollectives - 1) && within(header.halves, 1, 2) &&
         within(header.calls_per_half, 1, kMaxCalls) &&
         within(header.num_warmup_runs, 0, kMaxWarmupRuns) &&
         within(header.num_sizes, 1, kMaxSizes) &&
         within(header.num_cycles, 1, kMaxBlocks / header.num_sizes) &&
         within(header.num_configs, 1, kMaxConfigs);
}

const char* check_body(Schedule* schedule) noexcept {
  for (std::int32_t i = 0; i < schedule->num_warmup_runs; ++i) {
    const WarmupRun& run = schedule->warmup[i];
    if (!is_size(run.size_bytes) || run.num_calls == 0 || run.num_calls > kMaxCalls) {
      return "a warm-up run is out of range";
    }
  }
  for (std::int32_t i = 0; i < schedule->num_sizes; ++i) {
    if (!is_size(schedule->sizes[i])) return "a size is out of range";
  }
  for (std::int32_t i = 0; i < schedule->num_configs; ++i) {
    if (!entry_is_sound(schedule->collective, schedule->configs[i])) {
      return "a config is outside the vocabulary";
    }
    schedule->sets_chunks |= schedule->configs[i].chunk_bytes != 0;
  }
  for (std::int32_t i = 0; i < schedule->num_blocks; ++i) {
    if (schedule->blocks[i] >= schedule->num_configs) return "a block has no config";
  }
  return nullptr;
}

/// `count` items at `*bytes`, which moves on.
template <typename Item>
const Item* items_at(const std::uint8_t** bytes, std::int32_t count) noexcept {
  const auto* items = reinterpret_cast<const Item*>(*bytes);
  *bytes = reinterpret_cast<const std::uint8_t*>(items + count);
  return items;
}

}  // namespace

const char* decode_schedule(const std::uint8_t* bytes, std::size_t size,
                            Schedule* schedule) noexcept {
  if (size < kScheduleHeaderBytes + kChecksumBytes) return "it is too short";
  std::memcpy(static_cast<ScheduleHeader*>(schedule), bytes, kScheduleHeaderBytes);
  if (std::memcmp(schedule->magic, kScheduleMagic, sizeof kScheduleMagic) != 0) {
    return "it is not a DynamICCL schedule";
  }
  if (schedule->version != kScheduleVersion) return "its format version is another";
  if (!is_sound(*schedule)) return "a number in its header is out of range";
  schedule->num_blocks = schedule->num_cycles * schedule->num_sizes;
  const auto all = [](std::int32_t count, std::size_t item_bytes) {
    return static_cast<std::size_t>(count) * item_bytes;
  };
  const std::size_t end = kScheduleHeaderBytes +
                          all(schedule->num_warmup_runs, sizeof *schedule->warmup) +
                          all(schedule->num_sizes, sizeof *schedule->sizes) +
                          all(schedule->num_configs, sizeof *schedule->configs) +
                          all(schedule->num_blocks, sizeof *schedule->blocks);
  if (size != end + kChecksumBytes) return "its length does not fit its header";
  std::memcpy(&schedule->checksum, bytes + end, kChecksumBytes);
  if (schedule->checksum != fnv1a(bytes, end)) return "its checksum does not match";
  schedule->bytes = static_cast<std::uint8_t*>(std::malloc(end));
  if (schedule->bytes == nullptr) return "memory is short";
  std::memcpy(schedule->bytes, bytes, end);
  const std::uint8_t* body = schedule->bytes + kScheduleHeaderBytes;
  schedule->warmup = items_at<WarmupRun>(&body, schedule->num_warmup_runs);
  schedule->sizes = items_at<std::uint64_t>(&body, schedule->num_sizes);
  schedule->configs = items_at<Entry>(&body, schedule->num_configs);
  schedule->blocks = items_at<std::uint16_t>(&body, schedule->num_blocks);
  return check_body(schedule);
}

const char* load_schedule(const char* path, Schedule* schedule) noexcept {
  const File file(path);
  if (!file.is_open()) return "it cannot be opened";
  auto* bytes = static_cast<std::uint8_t*>(std::malloc(kMaxScheduleBytes + 1));
  if (bytes == nullptr) return "memory is short";
  const ssize_t size = file.read_all(bytes, kMaxScheduleBytes + 1);
  const char* problem = "it cannot be read";
  if (size >= 0) {
    problem = static_cast<std::size_t>(size) > kMaxScheduleBytes
                  ? "it is too long"
                  : decode_schedule(bytes, static_cast<std::size_t>(size), schedule);
  }
  std::free(bytes);
  return problem;
}

}  // namespace dynamiccl
