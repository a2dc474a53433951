// Any bytes as plugin.index: refused, or every look-up answers.
#include <cstdlib>
#include <memory>

#include "identity/index.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
  const auto index = std::make_unique<dynamiccl::PluginIndex>();
  const bool sound = index->decode(bytes, size) == nullptr;
  const char* system = index->find_system("gpu=a*8;mig=0;nic=socket*1;nccl=22809");
  std::uint8_t hash[dynamiccl::kDigestBytes];
  const bool has_table = index->file_hash("table", system != nullptr ? system : "box", 1, 8, hash);
  const bool has_noise = index->noise_ppm("box", 4) >= 0;
  if (!sound && (system != nullptr || has_table || has_noise)) std::abort();
  return 0;
}
