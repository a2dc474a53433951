// The hot path, which only computes, and the one slow path off it: the gate.
#include "tuner.h"

#include <cstdlib>

#include "platform/exit_gate.h"
#include "platform/made.h"
#include "platform/threads.h"
#include "profiler.h"
#include "service/service.h"

namespace dynamiccl {
namespace {

constexpr std::uint64_t kWaitPauseNs = 50'000;

/// Whether 2.21, which checks nothing, can run this everywhere that its table was measured.
bool runs_without_cost_table(const Entry& entry, int num_nodes, int nvls_support) noexcept {
  if (entry.algorithm == kAuto || entry.protocol == kAuto) return false;
  if (entry.algorithm == kCollNetDirect || entry.algorithm == kCollNetChain) return false;
  if (entry.algorithm > kNVLSTree) return false;
  const bool is_nvls = entry.algorithm == kNVLS || entry.algorithm == kNVLSTree;
  if (is_nvls && nvls_support != 1) return false;
  // NVLS over several nodes needs CollNet, NVLSTree needs several (v2.21.5-1 `src/enqueue.cc`).
  if (entry.algorithm == kNVLS) return num_nodes == 1;
  return entry.algorithm != kNVLSTree || num_nodes > 1;
}

}  // namespace

Context::~Context() {
  if (owns_clock_) unmake(clock_);
}

ncclResult_t Context::answer(int collective, std::size_t size_bytes, CostTable costs,
                             int* num_channels) noexcept {
  ncclResult_t result = ncclSuccess;
  const bool answers = clock_->begin() || pass_gate(&result);
  const Entry* entry = answers ? lookup(clock_->table(), collective, size_bytes) : nullptr;
  if (entry != nullptr && is_sound(costs)) choose(*entry, num_nodes_, costs, num_channels);
  clock_->end(collective, size_bytes);
  return result;
}

ncclResult_t Context::answer_v2(int collective, std::size_t size_bytes, int nvls_support,
                                int* algorithm, int* protocol, int* num_channels) noexcept {
  ncclResult_t result = ncclSuccess;
  const bool answers = clock_->begin() || pass_gate(&result);
  const Entry* entry = answers ? lookup(clock_->table(), collective, size_bytes) : nullptr;
  if (entry != nullptr && runs_without_cost_table(*entry, num_nodes_, nvls_support)) {
    *algorithm = entry->algorithm;
    *protocol = entry->protocol;
    if (entry->num_channels != 0 && clamps_channels(entry->algorithm, num_nodes_)) {
      *num_channels = entry->num_channels;
    }
  }
  clock_->end(collective, size_bytes);
  return result;
}

bool Context::pass_gate(ncclResult_t* result) noexcept {
  bool woken = false;
  for (;;) {
    const Clock::Turn turn = clock_->turn(monotonic_ns());
    if (turn == Clock::Turn::kWait) {
      if (!woken && agreement_ != nullptr) wake_service();
      woken = true;
      sleep_ns(kWaitPauseNs);
      continue;
    }
    if (turn == Clock::Turn::kAbstain) return false;
    if (agreement_ != nullptr) {
      speak();
      if (agreement_->settings().mode == Mode::kAdaptive) watch_exit();
      Profiler* profiler = agreement_->profiler.load(std::memory_order_acquire);
      if (profiler != nullptr) profiler->take_times(clock_->is_probing());
    }
    if (turn == Clock::Turn::kGo) return true;
    *result = ncclRemoteError;
    return false;
  }
}

/// What the agreement has to say, on a thread of NCCL's.
void Context::speak() noexcept {
  char line[kLineBytes];
  if (agreement_ == nullptr || logger_ == nullptr || !agreement_->take_line(line)) return;
  logger_(NCCL_LOG_INFO, NCCL_INIT | NCCL_TUNING, "dynamiccl", __LINE__, "%s", line);
}

void Context::speak_last() noexcept {
  char line[kLineBytes];
  if (logger_ == nullptr) return;
  if (agreement_->take_note(line)) {
    logger_(NCCL_LOG_INFO, NCCL_INIT | NCCL_TUNING, "dynamiccl", __LINE__, "%s", line);
  }
  const std::uint64_t captured = agreement_->clock()->captured_calls();
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
  if (agreement != nullptr) {
    Profiler* profiler = agreement->profiler.exchange(nullptr, std::memory_order_acq_rel);
    const bool is_left = profiler == nullptr || profiler->set_describe(nullptr, nullptr);
    context->speak();
    context->speak_last();
    if (!in_forked_child()) leave_service(agreement);
    if (is_empty && is_left) agreement->let_go();
  }
  if (!is_empty) return;
  context->~Context();
  std::free(context);
}

}  // namespace dynamiccl
