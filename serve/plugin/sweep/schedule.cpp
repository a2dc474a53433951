// Every byte of a schedule file is checked once, at load; playing then trusts it.
#include "sweep/schedule.h"

#include <cstring>

#include "file.h"

namespace dynamiccl {
namespace {

constexpr std::size_t kRunBytes = 16;
constexpr std::size_t kSizeBytes = 8;
constexpr std::size_t kConfigBytes = 8;
constexpr std::size_t kBlockBytes = 2;
static_assert(sizeof(WarmupRun) == kRunBytes && sizeof(Entry) == kConfigBytes,
              "in memory as large as in the file, so that one allocation is measured by it");

bool within(std::int64_t value, std::int64_t low, std::int64_t high) noexcept {
  return value >= low && value <= high;
}

bool is_size(std::uint64_t size_bytes) noexcept {
  return size_bytes != 0 && size_bytes >> kMaxSizeBits == 0;
}

const char* read_header(const std::uint8_t* bytes, std::size_t size, Schedule* schedule) noexcept {
  if (size < kScheduleHeaderBytes + kChecksumBytes) return "it is too short";
  if (std::memcmp(bytes, kScheduleMagic, sizeof kScheduleMagic) != 0) {
    return "it is not a DynamICCL schedule";
  }
  if (read_unsigned(bytes + 8, 4) != kScheduleVersion) return "its format version is another";
  schedule->num_nodes = read_int32(bytes + 12);
  schedule->num_ranks = read_int32(bytes + 16);
  schedule->collective = read_int32(bytes + 20);
  schedule->halves = read_int32(bytes + 24);
  schedule->calls_per_half = read_int32(bytes + 28);
  schedule->num_warmup_runs = read_int32(bytes + 32);
  schedule->num_sizes = read_int32(bytes + 36);
  const std::int32_t num_cycles = read_int32(bytes + 40);
  schedule->num_configs = read_int32(bytes + 44);
  const bool sound = schedule->num_nodes >= 1 && schedule->num_ranks >= schedule->num_nodes &&
                     within(schedule->collective, 0, kNumCollectives - 1) &&
                     within(schedule->halves, 1, 2) &&
                     within(schedule->calls_per_half, 1, kMaxCalls) &&
                     within(schedule->num_warmup_runs, 0, kMaxWarmupRuns) &&
                     within(schedule->num_sizes, 1, kMaxSizes) &&
                     within(num_cycles, 1, kMaxBlocks / schedule->num_sizes) &&
                     within(schedule->num_configs, 1, kMaxConfigs);
  if (!sound) return "a number in its header is out of range";
  schedule->num_blocks = num_cycles * schedule->num_sizes;
  return nullptr;
}

/// Reads `count` items of `item_bytes` each from `*bytes` to `*memory`; both move on.
template <typename Item, typename Read>
const Item* read_items(std::int32_t count, std::size_t item_bytes, const std::uint8_t** bytes,
                       std::uint8_t** memory, Read read) noexcept {
  Item* items = reinterpret_cast<Item*>(*memory);
  for (std::int32_t i = 0; i < count; ++i) {
    items[i] = read(*bytes);
    *bytes += item_bytes;
  }
  *memory += static_cast<std::size_t>(count) * sizeof(Item);
  return items;
}

/// Copies what follows the header into schedule->memory, largest alignment first as in the file.
void read_body(const std::uint8_t* bytes, Schedule* schedule) noexcept {
  auto* memory = static_cast<std::uint8_t*>(schedule->memory);
  schedule->warmup = read_items<WarmupRun>(
      schedule->num_warmup_runs, kRunBytes, &bytes, &memory, [](const std::uint8_t* run) {
        return WarmupRun{read_unsigned(run, 8), read_unsigned(run + 8, 8)};
      });
  schedule->sizes =
      read_items<std::uint64_t>(schedule->num_sizes, kSizeBytes, &bytes, &memory,
                                [](const std::uint8_t* size) { return read_unsigned(size, 8); });
  schedule->configs = read_items<Entry>(
      schedule->num_configs, kConfigBytes, &bytes, &memory, [](const std::uint8_t* config) {
        return Entry{static_cast<std::int8_t>(config[0]), static_cast<std::int8_t>(config[1]),
                     static_cast<std::int8_t>(config[2]), static_cast<std::int8_t>(config[3]),
                     read_int32(config + 4)};
      });
  schedule->blocks = read_items<std::uint16_t>(
      schedule->num_blocks, kBlockBytes, &bytes, &memory, [](const std::uint8_t* block) {
        return static_cast<std::uint16_t>(read_unsigned(block, 2));
      });
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

}  // namespace

const char* decode_schedule(const std::uint8_t* bytes, std::size_t size,
                            Schedule* schedule) noexcept {
  if (const char* problem = read_header(bytes, size, schedule)) return problem;
  const std::size_t body_bytes = kRunBytes * static_cast<std::size_t>(schedule->num_warmup_runs) +
                                 kSizeBytes * static_cast<std::size_t>(schedule->num_sizes) +
                                 kConfigBytes * static_cast<std::size_t>(schedule->num_configs) +
                                 kBlockBytes * static_cast<std::size_t>(schedule->num_blocks);
  const std::size_t body_end = kScheduleHeaderBytes + body_bytes;
  if (size != body_end + kChecksumBytes) return "its length does not fit its header";
  schedule->checksum = read_unsigned(bytes + body_end, kChecksumBytes);
  if (schedule->checksum != fnv1a(bytes, body_end)) return "its checksum does not match";
  schedule->memory = std::malloc(body_bytes);
  if (schedule->memory == nullptr) return "memory is short";
  read_body(bytes + kScheduleHeaderBytes, schedule);
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
