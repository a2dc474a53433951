// Creates and frees tables; never on the hot path.
#include "adaptive/agreement/table_in_force.h"

#include <cstdlib>
#include <new>

#include "platform/loaded_nccl.h"

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
  if (table != nullptr) leave_out_what_no_job_may_ask(loaded_nccl_version(), &table->decisions);
  return table;
}

void TableInForce::let_go() noexcept {
  if (holders.fetch_sub(1, std::memory_order_acq_rel) == 1) std::free(this);
}

}  // namespace dynamiccl
