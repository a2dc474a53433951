// The common case reads two numbers; switching the mask is rare.
#include "profiler/bursts.h"

#include "nccl/profiler_abi.h"

namespace dynamiccl {
namespace {

constexpr std::uint32_t kAll = 1'000'000;
// Calls above the share: bursts of several communicators may coincide.
constexpr std::uint64_t kAllowance = 64;

EventMask g_masks[8];

}  // namespace

int sample_ppm_of(const char* percent) noexcept {
  // Parsed by hand: strtod depends on the locale's decimal point.
  std::int64_t ppm = 0;
  std::int64_t unit = 10'000;
  bool is_fraction = false;
  bool has_digit = false;
  for (; *percent != '\0'; ++percent) {
    if (*percent == '.' && !is_fraction) {
      is_fraction = true;
      continue;
    }
    if (*percent < '0' || *percent > '9') return -1;
    has_digit = true;
    if (is_fraction) unit /= 10;
    ppm = (is_fraction ? ppm : 10 * ppm) + unit * (*percent - '0');
    if (ppm > kAll) return -1;
  }
  return has_digit ? static_cast<int>(ppm) : -1;
}

bool in_burst(std::uint64_t sequence, std::uint32_t sample_ppm) noexcept {
  if (sample_ppm == 0) return false;
  const std::uint64_t period = (kAll + sample_ppm / 2) / sample_ppm;  // in bursts' worth of calls
  const std::uint64_t block = sequence / kBurstCalls;
  return period == 1 || (block != 0 && block % period == 0);
}

EventMask* EventMask::of(int* mask) noexcept {
  for (EventMask& candidate : g_masks) {
    int* taken = nullptr;
    if (candidate.mask_.compare_exchange_strong(taken, mask) || taken == mask) return &candidate;
  }
  return nullptr;
}

void EventMask::begin(bool has_launches) noexcept {
  const int wanted = ncclProfileColl | (has_launches ? ncclProfileKernelLaunch : 0);
  __atomic_fetch_or(mask_.load(std::memory_order_relaxed), wanted, __ATOMIC_RELAXED);
}

bool EventMask::is_wide() const noexcept {
  const int mask = __atomic_load_n(mask_.load(std::memory_order_relaxed), __ATOMIC_RELAXED);
  return (mask & ncclProfileKernelCh) != 0;
}

void EventMask::widen(const void* owner, std::uint32_t sample_ppm) noexcept {
  const bool was_wide = is_wide();
  if (!was_wide && !within_budget(kBurstCalls, sample_ppm)) return;
  owner_.store(owner, std::memory_order_relaxed);
  if (was_wide) return;
  __atomic_fetch_or(mask_.load(std::memory_order_relaxed), ncclProfileKernelCh, __ATOMIC_RELAXED);
}

void EventMask::let_go(const void* owner) noexcept {
  const void* const holder = owner_.load(std::memory_order_relaxed);  // null: two threads raced
  if ((holder == owner || holder == nullptr) && is_wide()) narrow();
}

void EventMask::narrow() noexcept {
  owner_.store(nullptr, std::memory_order_relaxed);
  __atomic_fetch_and(mask_.load(std::memory_order_relaxed), ~ncclProfileKernelCh, __ATOMIC_RELAXED);
}

void EventMask::count(bool is_sampled, std::uint32_t sample_ppm) noexcept {
  calls_.fetch_add(1, std::memory_order_relaxed);
  if (!is_sampled) return;
  sampled_.fetch_add(1, std::memory_order_relaxed);
  if (!within_budget(0, sample_ppm) && is_wide()) narrow();
}

bool EventMask::within_budget(std::uint64_t more, std::uint32_t sample_ppm) const noexcept {
  const std::uint64_t calls = calls_.load(std::memory_order_relaxed);
  const std::uint64_t sampled = sampled_.load(std::memory_order_relaxed) + more;
  return sampled <= kAllowance || (sampled - kAllowance) * kAll <= calls * sample_ppm;
}

}  // namespace dynamiccl
