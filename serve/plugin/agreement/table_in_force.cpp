// Making and freeing tables; never on the hot path.
#include "agreement/table_in_force.h"

#include <cstdlib>
#include <new>

namespace dynamiccl {

TableInForce* TableInForce::abstaining(std::uint32_t number) noexcept {
  void* memory = std::calloc(1, sizeof(TableInForce));
  if (memory == nullptr) return nullptr;
  auto* table = new (memory) TableInForce;
  table->holders.store(1, std::memory_order_relaxed);
  table->number = number;
  table->decisions.num_bins = 0;  // no size is in it
  return table;
}

TableInForce* TableInForce::decode(const std::uint8_t* bytes, std::size_t size,
                                   std::uint32_t number) noexcept {
  TableInForce* table = abstaining(number);
  if (table != nullptr && decode_table(bytes, size, &table->decisions) != nullptr) {
    table->let_go();
    return nullptr;
  }
  if (table != nullptr) {
    const DecisionTable& decisions = table->decisions;
    for (int i = 0; i < kNumCollectives * decisions.num_bins; ++i) {
      const int collective = i / decisions.num_bins;
      const int bin = decisions.first_bin + i % decisions.num_bins;
      table->ready[collective * kReadyBins + bin] = make_ready(decisions.entries[i]);
    }
  }
  return table;
}

void TableInForce::let_go() noexcept {
  if (holders.fetch_sub(1, std::memory_order_acq_rel) == 1) std::free(this);
}

}  // namespace dynamiccl
