// A place changes hands through one compare-and-swap of its state; who reads one looks at the state
// before and after. No lock, no wait.
#include "next/pairs.h"

#include <cstdlib>

namespace dynamiccl {
namespace {

// What a place's `state` holds below the number of its turn.
enum Phase : std::uint64_t { kFree = 0, kFilling = 1, kOpen = 2, kClosed = 3 };
constexpr std::uint64_t kPhase = 3;

constexpr unsigned kLives = 4;
constexpr std::uint64_t kTries = 64;
// Turns after which an event that has not stopped never will: NCCL drops some.
constexpr std::uint64_t kAbandoned = 8 * Pairs::kPlaces;

struct Place {
  std::atomic<std::uint64_t> state;  // the turn << 2 | its phase
  std::atomic<void*> ours;
  std::atomic<void*> theirs;
  std::atomic<std::uint64_t> link;
  std::atomic<int> mask;
  std::atomic<bool> is_orphan;
};

std::atomic<Place*> g_places{nullptr};  // those of all lives
std::atomic<std::uint64_t> g_turns[kLives];

std::uint64_t bits_of(void* handle) noexcept { return reinterpret_cast<std::uintptr_t>(handle); }

// A handle: bits 0-1 zero; 2-3 the life; 4-17 the place; 18-63 the turn, never 0.
constexpr unsigned kIndexShift = 4, kTurnShift = 18;
static_assert(Pairs::kPlaces == 1U << (kTurnShift - kIndexShift), "an index fits its bits");

std::uint64_t turn_of(void* handle) noexcept { return bits_of(handle) >> kTurnShift; }

PairLife life_of(void* handle) noexcept {
  return static_cast<PairLife>(bits_of(handle) >> 2 & (kLives - 1));
}

Place* places_of(PairLife life) noexcept {
  Place* places = g_places.load(std::memory_order_acquire);
  return places == nullptr ? nullptr : places + static_cast<std::size_t>(life) * Pairs::kPlaces;
}

Place* place_of(void* handle) noexcept {
  Place* places = places_of(life_of(handle));
  const std::size_t index = bits_of(handle) >> kIndexShift & (Pairs::kPlaces - 1);
  return places == nullptr ? nullptr : places + index;
}

}  // namespace

bool Pairs::allocate() noexcept {
  if (g_places.load(std::memory_order_acquire) != nullptr) return true;
  // Zeros are free places.
  auto* places = static_cast<Place*>(std::calloc(kLives * kPlaces, sizeof(Place)));
  if (places == nullptr) return false;
  Place* none = nullptr;
  if (!g_places.compare_exchange_strong(none, places)) std::free(places);
  return true;
}

void* Pairs::reserve(PairLife life, bool (*is_gone)(std::uint64_t link)) noexcept {
  Place* places = places_of(life);
  if (places == nullptr) return nullptr;
  std::atomic<std::uint64_t>& turns = g_turns[static_cast<unsigned>(life)];
  const std::uint64_t turn = turns.fetch_add(1, std::memory_order_relaxed) + 1;
  for (std::uint64_t i = 0; i < kTries; ++i) {
    const std::uint64_t index = (turn + i) % kPlaces;
    Place& place = places[index];
    std::uint64_t state = place.state.load(std::memory_order_acquire);
    if ((state & kPhase) == kFilling) continue;
    const bool is_abandoned = turn - (state >> 2) >= kAbandoned;
    if ((state & kPhase) == kOpen && !is_abandoned &&
        !is_gone(place.link.load(std::memory_order_relaxed))) {
      continue;
    }
    if (place.state.compare_exchange_strong(state, turn << 2 | kFilling,
                                            std::memory_order_acq_rel)) {
      const std::uint64_t bits =
          turn << kTurnShift | index << kIndexShift | static_cast<std::uint64_t>(life) << 2;
      return reinterpret_cast<void*>(static_cast<std::uintptr_t>(bits));
    }
  }
  return nullptr;
}

void Pairs::fill(void* handle, const Pair& pair) noexcept {
  Place* place = place_of(handle);
  // Released, so that none of them is seen without the state that `reserve` set before.
  place->ours.store(pair.ours, std::memory_order_release);
  place->theirs.store(pair.theirs, std::memory_order_release);
  place->link.store(pair.link, std::memory_order_release);
  place->mask.store(pair.mask, std::memory_order_release);
  place->is_orphan.store(pair.is_orphan, std::memory_order_release);
  place->state.store(turn_of(handle) << 2 | kOpen, std::memory_order_release);
}

void Pairs::cancel(void* handle) noexcept {
  Place* place = place_of(handle);
  place->state.store(turn_of(handle) << 2 | kFree, std::memory_order_release);
}

bool Pairs::find(void* handle, Pair* pair) noexcept {
  if (!is_handle(handle)) return false;
  const std::uint64_t turn = turn_of(handle);
  const Place* place = place_of(handle);
  if (place == nullptr) return false;
  const std::uint64_t before = place->state.load(std::memory_order_acquire);
  if (before >> 2 != turn || (before & kPhase) < kOpen) return false;
  pair->ours = place->ours.load(std::memory_order_acquire);
  pair->theirs = place->theirs.load(std::memory_order_acquire);
  pair->link = place->link.load(std::memory_order_acquire);
  pair->mask = place->mask.load(std::memory_order_acquire);
  pair->is_orphan = place->is_orphan.load(std::memory_order_acquire);
  const std::uint64_t after = place->state.load(std::memory_order_relaxed);
  return after >> 2 == turn && (after & kPhase) >= kOpen;
}

void Pairs::close(void* handle) noexcept {
  const std::uint64_t turn = turn_of(handle);
  Place* place = place_of(handle);
  if (place == nullptr) return;
  std::uint64_t open = turn << 2 | kOpen;
  const Phase next = life_of(handle) == PairLife::brief ? kFree : kClosed;
  place->state.compare_exchange_strong(open, turn << 2 | next, std::memory_order_acq_rel);
}

}  // namespace dynamiccl
