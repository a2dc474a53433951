// The common case reads two numbers; switching the mask is rare.
#include "profiler/bursts.h"

#include "nccl/profiler_abi.h"

namespace dynamiccl {
namespace {

constexpr std::uint32_t kAll = 1'000'000;
// Allowance above the share: bursts of several communicators may coincide.
constexpr std::uint64_t kAllowance = 64;
constexpr int kMaxMasks = 32;

EventMask g_masks[kMaxMasks];

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
    ppm = is_fraction ? ppm + unit * (*percent - '0') : 10 * ppm + unit * (*percent - '0');
    if (ppm > kAll) return -1;
  }
  return has_digit ? static_cast<int>(ppm) : -1;
}

std::uint64_t burst_period(std::uint32_t sample_ppm) noexcept {
  return sample_ppm == 0 ? 0 : (kAll + sample_ppm / 2) / sample_ppm;
}

bool in_burst(std::uint64_t sequence, std::uint64_t period) noexcept {
  if (period <= 1) return period == 1;
  const std::uint64_t block = sequence / kBurstCalls;
  return block != 0 && block % period == 0;
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

std::uint32_t EventMask::hold(std::uint32_t sample_ppm) noexcept {
  if (!within_budget(kBurstCalls, sample_ppm)) return 0;
  const std::uint64_t before = held_.fetch_add(1);
  apply();
  return static_cast<std::uint32_t>(before >> 32);
}

void EventMask::let_go(std::uint32_t epoch) noexcept {
  std::uint64_t held = held_.load();
  do {
    if (held >> 32 != epoch) return;
  } while (!held_.compare_exchange_weak(held, held - 1));
  apply();
}

bool EventMask::is_held(std::uint32_t epoch) const noexcept {
  return held_.load(std::memory_order_relaxed) >> 32 == epoch;
}

void EventMask::narrow() noexcept {
  std::uint64_t held = held_.load();
  std::uint64_t next;
  do {
    next = ((held >> 32) + 1) << 32;
    if (next == 0) next = kFirstEpoch;
  } while (!held_.compare_exchange_weak(held, next));
  apply();
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

void EventMask::apply() noexcept {
  int* mask = mask_.load(std::memory_order_relaxed);
  // If the count has changed meanwhile, the new value is applied.
  for (std::uint64_t held = held_.load(), applied = ~held; applied != held; held = held_.load()) {
    applied = held;
    if ((held & 0xffffffffU) != 0) {
      __atomic_fetch_or(mask, ncclProfileKernelCh, __ATOMIC_SEQ_CST);
    } else {
      __atomic_fetch_and(mask, ~ncclProfileKernelCh, __ATOMIC_SEQ_CST);
    }
  }
}

void Bursts::step(EventMask* mask, std::uint64_t sequence, std::uint64_t period,
                  std::uint32_t sample_ppm, bool is_sampled) noexcept {
  std::uint32_t epoch = epoch_.load(std::memory_order_relaxed);
  if (epoch != 0 && !mask->is_held(epoch)) {
    epoch_.compare_exchange_strong(epoch, 0, std::memory_order_relaxed);
    epoch = 0;
  }
  const bool is_next_in_burst = in_burst(sequence + 1, period);
  if (epoch == 0 && is_next_in_burst) {
    const std::uint32_t held = mask->hold(sample_ppm);
    std::uint32_t none = 0;
    if (held != 0 && !epoch_.compare_exchange_strong(none, held, std::memory_order_relaxed)) {
      mask->let_go(held);  // another thread of this communicator was faster
    }
    until_.store(sequence + kPatience, std::memory_order_relaxed);
  } else if (epoch != 0 && !is_next_in_burst &&
             (is_sampled || sequence > until_.load(std::memory_order_relaxed))) {
    end(mask);
  }
}

void Bursts::end(EventMask* mask) noexcept {
  const std::uint32_t epoch = epoch_.exchange(0, std::memory_order_relaxed);
  if (epoch != 0) mask->let_go(epoch);
}

}  // namespace dynamiccl
