// getCollInfo fast path (clock and look-up), and the slow path at the gate.
#include "adaptive/context.h"

#include "adaptive/service/service.h"
#include "platform/allocate.h"
#include "platform/barriers.h"
#include "platform/exit_gate.h"
#include "platform/threads.h"
#include "profiler/profiler.h"

namespace dynamiccl {
namespace {

constexpr std::uint64_t kWaitPauseNs = 50'000;

/// Contexts that a call never left, as a linked list that leak detectors can reach.
std::atomic<Context*> g_left_behind{nullptr};

}  // namespace

ncclResult_t Context::answer(int collective, std::size_t size_bytes, CostTable costs,
                             int* num_channels) noexcept {
  ncclResult_t result = ncclSuccess;
  const bool answers = clock_->begin() || pass_gate(&result);
  const Entry* entry = answers ? lookup(clock_->table(), collective, size_bytes) : nullptr;
  if (entry != nullptr && is_sound(costs)) choose(*entry, num_nodes_, costs, num_channels);
  clock_->end(collective, size_bytes);
  return result;
}

/// The slow path of a call at the gate: true to look up in the table.
bool Context::pass_gate(ncclResult_t* result) noexcept {
  bool woken = false;
  for (;;) {
    const Clock::Turn turn = clock_->turn(monotonic_ns());
    if (turn == Clock::Turn::kWait) {
      if (!woken) wake_service();
      woken = true;
      sleep_ns(kWaitPauseNs);
      continue;
    }
    if (turn == Clock::Turn::kAbstain) return false;
    speak();
    watch_exit();
    Profiler* profiler = agreement_->profiler.load(std::memory_order_acquire);
    if (profiler != nullptr) profiler->take_times(clock_->is_probing());
    if (turn == Clock::Turn::kGo) return true;
    *result = ncclRemoteError;
    return false;
  }
}

/// Prints the agreement's waiting line, on a thread of NCCL's.
void Context::speak() noexcept {
  char line[kLineBytes];
  if (logger_ == nullptr || !agreement_->take_line(line)) return;
  logger_(NCCL_LOG_INFO, NCCL_INIT | NCCL_TUNING, "dynamiccl", __LINE__, "%s", line);
}

void Context::speak_last() noexcept {
  char line[kLineBytes];
  if (logger_ == nullptr) return;
  if (agreement_->take_note(line)) {
    logger_(NCCL_LOG_INFO, NCCL_INIT | NCCL_TUNING, "dynamiccl", __LINE__, "%s", line);
  }
  const std::uint64_t captured = clock_->captured_calls();
  if (captured == 0) return;
  logger_(
      NCCL_LOG_INFO, NCCL_INIT | NCCL_TUNING, "dynamiccl", __LINE__,
      "DYNAMICCL: %d ranks on %d nodes: %llu calls were captured in CUDA graphs, which keep the "
      "choice of that moment",
      agreement_->place().num_ranks, agreement_->place().num_nodes,
      static_cast<unsigned long long>(captured));
}

void Context::retire(Context* context) noexcept {
  if (context == nullptr) return;
  Clock* clock = context->clock_;
  clock->close();
  const bool is_empty = wait_until([clock] { return clock->is_empty(); });
  Agreement* agreement = context->agreement_;
  Profiler* profiler = agreement->profiler.exchange(nullptr, std::memory_order_acq_rel);
  const bool is_left = profiler == nullptr || profiler->set_describe(nullptr, nullptr);
  context->speak();
  context->speak_last();
  if (!in_forked_child()) leave_service(agreement);
  if (is_empty && is_left) agreement->let_go();
  if (is_empty) return deallocate(context);
  context->left_before_ = g_left_behind.load();
  while (!g_left_behind.compare_exchange_weak(context->left_before_, context)) {
  }
}

}  // namespace dynamiccl
