// What NCCL sees of mode table. The context is a pointer to the table, or null where NCCL's own
// choice stands.
#include "tuner/init.h"

namespace {

using namespace dynamiccl;

struct TableTuner {
  static ncclResult_t create(const Communicator& communicator, void** context) noexcept {
    const DecisionTable* table = nullptr;
    const ncclResult_t result = init_communicator(communicator, "none", &table);
    *context = const_cast<DecisionTable*>(table);
    return result;
  }

  static ncclResult_t answer(void* context, const Question& question) noexcept {
    dynamiccl::answer(*static_cast<const DecisionTable*>(context), question);
    return ncclSuccess;
  }

  /// Nothing to free: tables stay until the process ends.
  static ncclResult_t finalize(void*) noexcept { return ncclSuccess; }
};

}  // namespace

DYNAMICCL_EXPORT_TUNER(TableTuner)
