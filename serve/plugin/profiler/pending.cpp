// All changes go through one compare-and-swap of the slot's state: no lock, no wait.
#include "profiler/pending.h"

#include <cstdlib>

#include "profiler/recorder.h"

namespace dynamiccl {
namespace {

constexpr int kTries = 8;

void keep_least(std::atomic<std::uint64_t>* kept, std::uint64_t value) noexcept {
  std::uint64_t before = kept->load(std::memory_order_relaxed);
  while (value < before && !kept->compare_exchange_weak(before, value, std::memory_order_relaxed)) {
  }
}

void keep_largest(std::atomic<std::uint64_t>* kept, std::uint64_t value) noexcept {
  std::uint64_t before = kept->load(std::memory_order_relaxed);
  while (value > before && !kept->compare_exchange_weak(before, value, std::memory_order_relaxed)) {
  }
}

}  // namespace

bool Pending::allocate() noexcept {
  slots_ = static_cast<Slot*>(std::calloc(kSlots, sizeof(Slot)));
  return slots_ != nullptr;
}

bool Pending::begin(const CallRecord& record, Ticket* ticket) noexcept {
  for (int i = 0; i < kTries; ++i) {
    // Round and round: the next slot is the oldest one.
    const std::uint32_t index = next_.fetch_add(1, std::memory_order_relaxed) % kSlots;
    Slot& slot = slots_[index];
    std::uint64_t state = slot.state.load(std::memory_order_relaxed);
    if (!claim(&slot, &state)) continue;
    if ((state & kUsed) != 0) publish(&slot);
    slot.record = record;
    slot.began.store(0, std::memory_order_relaxed);
    slot.stamped.store(0, std::memory_order_relaxed);
    slot.ended.store(0, std::memory_order_relaxed);
    slot.start_ns.store(~std::uint64_t{0}, std::memory_order_relaxed);
    slot.stop_ns.store(0, std::memory_order_relaxed);
    const auto generation = static_cast<std::uint32_t>(state >> kGenerationShift) + 1;
    *ticket = {generation, static_cast<std::uint8_t>(index)};
    const std::uint64_t fresh = std::uint64_t{generation} << kGenerationShift | kUsed;
    slot.state.store(fresh | record.num_channels, std::memory_order_release);
    return true;
  }
  return false;
}

void Pending::end(Ticket ticket) noexcept {
  if (Slot* slot = enter(ticket)) leave(slot, 0, kEnded);
}

void Pending::channel_begin(Ticket ticket, int channel, std::uint64_t gpu_ns) noexcept {
  Slot* slot = enter(ticket);
  if (slot == nullptr) return;
  slot->began.fetch_or(std::uint64_t{1} << channel, std::memory_order_relaxed);
  keep_least(&slot->start_ns, gpu_ns);
  leave(slot, 0, 0);
}

void Pending::channel_stamp(Ticket ticket, int channel, std::uint64_t gpu_ns) noexcept {
  Slot* slot = enter(ticket);
  if (slot == nullptr) return;
  slot->stamped.fetch_or(std::uint64_t{1} << channel, std::memory_order_relaxed);
  keep_largest(&slot->stop_ns, gpu_ns);
  leave(slot, 0, 0);
}

void Pending::channel_end(Ticket ticket, int channel) noexcept {
  Slot* slot = enter(ticket);
  if (slot == nullptr) return;
  const std::uint64_t bit = std::uint64_t{1} << channel;
  const bool again = (slot->ended.fetch_or(bit, std::memory_order_relaxed) & bit) != 0;
  leave(slot, again ? 0 : 1, 0);
}

void Pending::flush() noexcept {
  for (int i = 0; i < kSlots; ++i) {
    Slot& slot = slots_[i];
    std::uint64_t state = slot.state.load(std::memory_order_relaxed);
    if ((state & kUsed) == 0 || !claim(&slot, &state)) continue;
    if ((state & kUsed) != 0) publish(&slot);
    // The generation stays: only `begin` gives out tickets, and it makes a new one.
    slot.state.store(state >> kGenerationShift << kGenerationShift, std::memory_order_release);
  }
}

Pending::Slot* Pending::enter(Ticket ticket) noexcept {
  Slot& slot = slots_[ticket.slot];
  std::uint64_t state = slot.state.load(std::memory_order_relaxed);
  while (true) {
    const bool is_ours = state >> kGenerationShift == ticket.generation && (state & kUsed) != 0 &&
                         (state & kClaimed) == 0 && (state & kInside) != kInside;
    if (!is_ours) return nullptr;
    if (slot.state.compare_exchange_weak(state, state + kInsideOne, std::memory_order_acquire,
                                         std::memory_order_relaxed)) {
      return &slot;
    }
  }
}

void Pending::leave(Slot* slot, std::uint64_t channels, std::uint64_t ended) noexcept {
  std::uint64_t state = slot->state.load(std::memory_order_relaxed);
  std::uint64_t next;
  bool is_last;
  do {
    next = (state - kInsideOne) | ended;
    if ((next & kChannels) >= channels) next -= channels;
    is_last = (next & (kInside | kChannels)) == 0 && (next & kEnded) != 0;
    if (is_last) next |= kClaimed;
  } while (!slot->state.compare_exchange_weak(state, next, std::memory_order_acq_rel,
                                              std::memory_order_relaxed));
  if (!is_last) return;
  publish(slot);
  slot->state.store(next >> kGenerationShift << kGenerationShift, std::memory_order_release);
}

bool Pending::claim(Slot* slot, std::uint64_t* state) noexcept {
  if ((*state & (kClaimed | kInside)) != 0) return false;
  return slot->state.compare_exchange_strong(*state, *state | kClaimed, std::memory_order_acq_rel,
                                             std::memory_order_relaxed);
}

void Pending::publish(Slot* slot) noexcept {
  const std::uint64_t began = slot->began.load(std::memory_order_relaxed);
  const std::uint64_t start_ns = slot->start_ns.load(std::memory_order_relaxed);
  const std::uint64_t stop_ns = slot->stop_ns.load(std::memory_order_relaxed);
  const bool is_whole = __builtin_popcountll(began) == slot->record.num_channels &&
                        slot->stamped.load(std::memory_order_relaxed) == began && start_ns != 0 &&
                        start_ns < stop_ns;
  // Of some channels alone the least start and the largest stop would be another, shorter time.
  slot->record.start_ns = is_whole ? start_ns : 0;
  slot->record.stop_ns = is_whole ? stop_ns : 0;
  if (!is_whole) slot->record.flags |= kFlagIncomplete;
  Recorder::push(slot->record);
}

}  // namespace dynamiccl
