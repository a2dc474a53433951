// Files that the plugin reads (libFuzzer), DYNAMICCL_FUZZED of them: a table that decodes can be
// looked up everywhere and holds sound entries alone; a schedule that decodes can be played to its
// end.
#undef NDEBUG
#include <cassert>

#include "sweep/schedule.h"
#include "tests/table_file.h"

using namespace dynamiccl;

namespace {

[[maybe_unused]] void table(const std::uint8_t* bytes, std::size_t size) {
  static DecisionTable table;
  if (decode_table(bytes, size, &table) != nullptr) return;
  for (int collective = -1; collective <= kNumCollectives; ++collective) {
    for (int bin = 0; bin < kBinsPerOctave * 64; ++bin) {
      const int octave = bin / kBinsPerOctave;
      const std::uint64_t quarters = 4 + static_cast<std::uint64_t>(bin % kBinsPerOctave);
      const std::uint64_t size_bytes = octave < 2 ? 1ULL << octave : quarters << (octave - 2);
      const Entry* entry = lookup(table, collective, size_bytes);
      if (entry != nullptr) assert(entry->act == 1 && entry_is_sound(collective, *entry));
    }
    assert(lookup(table, collective, 0) == nullptr);
    assert(lookup(table, collective, UINT64_MAX) == nullptr);
  }
}

[[maybe_unused]] void schedule(const std::uint8_t* bytes, std::size_t size) {
  Schedule schedule;
  if (decode_schedule(bytes, size, &schedule) != nullptr) return;
  for (std::int32_t i = 0; i < schedule.num_warmup_runs; ++i) {
    assert(schedule.warmup[i].size_bytes != 0 && schedule.warmup[i].num_calls != 0);
  }
  for (std::int32_t i = 0; i < schedule.num_sizes; ++i) {
    assert(size_bin(schedule.sizes[i]) >= 0);
  }
  assert(schedule.num_blocks % schedule.num_sizes == 0);
  for (std::int32_t i = 0; i < schedule.num_blocks; ++i) {
    assert(schedule.blocks[i] < schedule.num_configs);
    assert(entry_is_sound(schedule.collective, schedule.configs[schedule.blocks[i]]));
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
  DYNAMICCL_FUZZED(bytes, size);
  if (size < 8) return 0;
  // With a checksum that fits in its last eight bytes, as no fuzzer finds one by itself.
  const Bytes sound = sealed(Bytes(bytes, bytes + size - 8));
  DYNAMICCL_FUZZED(sound.data(), size);
  return 0;
}
