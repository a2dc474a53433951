// What NCCL sees of mode table. The context is a pointer to the table, or null where NCCL's own
// choice stands.
#include "nccl/tuner_shell.h"
#include "tuner/init.h"

namespace {

using namespace dynamiccl;

struct TableTuner {
  static ncclResult_t create(Communicator communicator, int abi_version, ncclTunerConstants_v5_t*,
                             void** context) noexcept {
    if (abi_version < 5) communicator.comm_id = take_comm_id(communicator);
    const DecisionTable* table = nullptr;
    const ncclResult_t result = init_communicator(communicator, "none", &table);
    *context = const_cast<DecisionTable*>(table);
    return result;
  }

  static ncclResult_t answer(void* context, const Question& question) noexcept {
    if (!is_about_a_cell(question.num_pipe_ops)) return ncclSuccess;
    dynamiccl::answer(*static_cast<const DecisionTable*>(context), question.collective,
                      question.size_bytes, question.costs, question.num_channels);
    return ncclSuccess;
  }

  /// Nothing to free: tables stay until the process ends.
  static ncclResult_t finalize(void*) noexcept { return ncclSuccess; }
};

}  // namespace

DYNAMICCL_EXPORT_TUNER(TableTuner)
