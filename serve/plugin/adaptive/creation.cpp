// Creates a communicator's context: identifies the rank, and reads the settings.
#include <cstdio>

#include "adaptive/context.h"
#include "adaptive/service/service.h"
#include "identity/environment.h"
#include "platform/allocate.h"
#include "platform/threads.h"
#include "profiler/created.h"
#include "profiler/profiler.h"

namespace dynamiccl {
namespace {

/// Why this rank abstains whatever the artifact holds, or null. Its communicator then does, too.
const char* reason_to_abstain(const Checked& checked) noexcept {
  if (is_one("DYNAMICCL_DISABLE")) return "DYNAMICCL_DISABLE is 1";
  if (checked.reason_to_abstain != nullptr) return checked.reason_to_abstain;
  if (checked.ids_repeat) return kIdsRepeat;
  if (is_switched_on("NCCL_ENQUEUE_REARCH_ENABLE")) {  // 2.32 src/tuning/tuning.cc
    return "NCCL_ENQUEUE_REARCH_ENABLE is set: a table would beat kernels it is not shown";
  }
  return nullptr;
}

/// This rank, as NCCL told our profiler just before. Null on success, else why it is not known.
const char* identify(const Communicator& communicator, CreatedCommunicator* told) noexcept {
  if (take_created(communicator.comm_id, told) && told->profiler != nullptr &&
      told->num_ranks == static_cast<std::int32_t>(communicator.num_ranks) &&
      told->num_nodes == static_cast<std::int32_t>(communicator.num_nodes) && told->rank >= 0 &&
      told->rank < told->num_ranks) {
    return nullptr;
  }
  return "NCCL_PROFILER_PLUGIN does not name this library too, and NCCL tells a profiler alone "
         "which rank this is and what is launched";
}

/// Starts an agreement; null with a reason on failure.
Agreement* begin_agreement(const CreatedCommunicator& told, Settings* settings,
                           const char** reason) noexcept {
  Agreement* agreement =
      Agreement::create({told.comm_id, told.rank, told.num_ranks, told.num_nodes}, settings);
  *reason = "memory is short";
  if (agreement == nullptr) return nullptr;
  agreement->clock()->heed(told.profiler->marks());
  agreement->profiler.store(told.profiler, std::memory_order_release);
  if (join_service(agreement, reason)) return agreement;
  agreement->let_go();
  return nullptr;
}

}  // namespace

void Context::abstain(const Communicator& communicator, const char* reason) noexcept {
  if (communicator.logger == nullptr) return;
  char line[512];
  std::snprintf(line, sizeof line,
                "DYNAMICCL: %zu ranks on %zu nodes: NCCL's own choice stands: %s",
                communicator.num_ranks, communicator.num_nodes, reason);
  communicator.logger(NCCL_LOG_INFO, NCCL_INIT | NCCL_TUNING, "dynamiccl", __LINE__, "%s", line);
}

Context* Context::create(const Communicator& communicator) noexcept {
  if (in_forked_child() || communicator.num_ranks < 2) return nullptr;
  CreatedCommunicator told;
  const char* reason = identify(communicator, &told);        // first: it is taken whatever follows
  const Checked checked = check_communicator(communicator);  // so is its id, remembered
  if (const char* other = reason_to_abstain(checked)) reason = other;
  auto* settings = reason == nullptr ? allocate<Settings>() : nullptr;
  if (reason == nullptr && (settings == nullptr || !settings->read())) reason = "memory is short";
  if (reason == nullptr && settings->artifact == nullptr) reason = "DYNAMICCL_ARTIFACT is not set";
  if (reason == nullptr && communicator.num_nodes > 1 && settings->coordinator == nullptr) {
    reason =
        "DYNAMICCL_COORDINATOR is not set, and its nodes have no other way to agree; start the "
        "job with dynamiccl-run";
  }
  if (reason != nullptr) {
    deallocate(settings);
    abstain(communicator, reason);
    return nullptr;
  }
  Agreement* agreement = begin_agreement(told, settings, &reason);  // takes the settings over
  auto* context = agreement != nullptr ? allocate<Context>(agreement, communicator) : nullptr;
  if (context == nullptr) {
    if (agreement != nullptr) {
      leave_service(agreement);
      agreement->let_go();
    }
    abstain(communicator, reason != nullptr ? reason : "memory is short");
    return nullptr;
  }
  told.profiler->set_describe(
      [](void* user, CallRecord* record) { static_cast<Agreement*>(user)->describe(record); },
      agreement);
  return context;
}

}  // namespace dynamiccl
