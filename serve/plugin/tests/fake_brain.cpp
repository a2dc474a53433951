// A brain's library that behaves as the artifact's name says; built three times, see
// CMakeLists.txt.
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "brain/brain_abi.h"

namespace {

int open_fake(const dynamiccl_brain_config* config, void** brain, char* reason,
              std::size_t reason_bytes) {
  if (std::strcmp(config->artifact, "refuses") == 0) {
    std::memset(reason, '\n', reason_bytes);  // no end, and not printable
    return 1;
  }
  if (std::strcmp(config->artifact, "refuses silently") == 0) return 1;
  *brain = strdup(config->artifact);
  return 0;
}

int decide_fake(void* brain, const dynamiccl_history*, std::uint8_t* table, std::size_t capacity,
                std::size_t* table_bytes, char* reason, std::size_t) {
  const char* kind = static_cast<const char*>(brain);
  if (std::strcmp(kind, "fails") == 0) {
    *table_bytes = 100;
    std::strcpy(reason, "not today");
    return 7;
  }
  if (std::strcmp(kind, "lies") == 0) *table_bytes = capacity + 1;
  if (std::strcmp(kind, "nonsense") == 0) {
    std::memset(table, 0x5a, capacity);
    *table_bytes = capacity;
  }
  return 0;
}

void close_fake(void* brain) { std::free(brain); }

constexpr dynamiccl_brain kFake = {FAKE_VERSION, "fake", open_fake,
                                   FAKE_VERSION == 1 ? decide_fake : nullptr, close_fake};

}  // namespace

extern "C" __attribute__((visibility("default"))) const dynamiccl_brain* FAKE_SYMBOL(void) {
  return &kFake;
}
