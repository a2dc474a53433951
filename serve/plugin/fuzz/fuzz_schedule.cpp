// Schedule files: whatever decodes can be played to its end.
#include "fuzz/input.h"
#include "sweep/schedule.h"

using namespace dynamiccl;

namespace {

void decode_and_walk(const std::uint8_t* bytes, std::size_t size) {
  Schedule schedule;
  const char* problem = decode_schedule(bytes, size, &schedule);
  if (problem != nullptr) {
    REQUIRE(problem[0] != '\0');
    return;
  }
  for (std::int32_t i = 0; i < schedule.num_warmup_runs; ++i) {
    REQUIRE(schedule.warmup[i].size_bytes != 0 && schedule.warmup[i].num_calls != 0);
  }
  for (std::int32_t i = 0; i < schedule.num_sizes; ++i) {
    REQUIRE(size_bin(schedule.sizes[i]) >= 0);
  }
  REQUIRE(schedule.num_blocks % schedule.num_sizes == 0);
  for (std::int32_t i = 0; i < schedule.num_blocks; ++i) {
    REQUIRE(schedule.blocks[i] < schedule.num_configs);
    REQUIRE(entry_is_sound(schedule.collective, schedule.configs[schedule.blocks[i]]));
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
  decode_and_walk(bytes, size);
  const Bytes sound = resealed(bytes, size);
  decode_and_walk(sound.data(), sound.size());
  return 0;
}
