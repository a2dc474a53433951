// Table files: whatever decodes can be looked up everywhere, and holds sound entries alone.
#include "fuzz/input.h"
#include "table.h"

using namespace dynamiccl;

namespace {

void decode_and_look_up(const std::uint8_t* bytes, std::size_t size) {
  static DecisionTable table;
  const char* problem = decode_table(bytes, size, &table);
  if (problem != nullptr) {
    REQUIRE(problem[0] != '\0');
    return;
  }
  for (int collective = -1; collective <= kNumCollectives; ++collective) {
    for (int bin = 0; bin < kBinsPerOctave * 64; ++bin) {
      const int octave = bin / kBinsPerOctave;
      const std::uint64_t quarters = 4 + static_cast<std::uint64_t>(bin % kBinsPerOctave);
      const std::uint64_t size_bytes = octave < 2 ? 1ULL << octave : quarters << (octave - 2);
      const Entry* entry = lookup(table, collective, size_bytes);
      if (entry != nullptr) REQUIRE(entry->act == 1 && entry_is_sound(collective, *entry));
    }
    REQUIRE(lookup(table, collective, 0) == nullptr);
    REQUIRE(lookup(table, collective, UINT64_MAX) == nullptr);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
  decode_and_look_up(bytes, size);
  const Bytes sound = resealed(bytes, size);
  decode_and_look_up(sound.data(), sound.size());
  return 0;
}
