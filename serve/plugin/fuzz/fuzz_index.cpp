// Any bytes as plugin.index: refused, or every look-up answers.
#include <cstdlib>
#include <cstring>
#include <memory>

#include "identity/index.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
  const auto index = std::make_unique<dynamiccl::PluginIndex>();
  const bool sound = index->decode(bytes, size) == nullptr;
  char system[dynamiccl::kSystemBytes] = "box", hash[dynamiccl::kHexBytes], noise[16];
  const bool is_known = index->find_system("gpu=a*8;mig=0;nic=socket*1;nccl=22809", system);
  const bool has_table = index->table_hash(system, 1, 8, hash);
  const bool has_noise = index->find("noise\tbox\t4\t", noise, sizeof noise);
  if (!sound && (is_known || has_table || has_noise)) std::abort();
  // It becomes a part of a path.
  if (std::strchr(system, '/') != nullptr || system[0] == '.') std::abort();
  return 0;
}
