// Implementation of ids.h.
#include "identity/ids.h"

#include <cstdlib>
#include <cstring>

namespace dynamiccl {
namespace {

constexpr std::size_t kFirstCapacity = 64;

/// Where an id is first looked for; ids are hashes already (0 is none).
std::size_t place_of(std::uint64_t id, std::size_t capacity) noexcept {
  return static_cast<std::size_t>(id * 0x9e3779b97f4a7c15U >> 32) & (capacity - 1);
}

}  // namespace

Ids::~Ids() { std::free(slots_); }

Ids::Ids(const Ids& other) noexcept : size_(other.size_), may_repeat_(other.may_repeat_) {
  if (other.capacity_ == 0) return;
  slots_ = static_cast<std::uint64_t*>(std::malloc(other.capacity_ * sizeof *slots_));
  if (slots_ == nullptr) {
    may_repeat_ = true;
    size_ = 0;
    return;
  }
  capacity_ = other.capacity_;
  std::memcpy(slots_, other.slots_, capacity_ * sizeof *slots_);
}

bool Ids::note(std::uint64_t id) noexcept {
  if (id == 0 || may_repeat_) return may_repeat_;
  may_repeat_ = holds(id);  // only ids of shrinks are in the set
  // Without memory for it nobody could tell any more.
  may_repeat_ |= !add(id_of_shrunk(id));
  return may_repeat_;
}

bool Ids::holds(std::uint64_t id) const noexcept {
  if (capacity_ == 0) return false;
  for (std::size_t at = place_of(id, capacity_);; at = (at + 1) & (capacity_ - 1)) {
    if (slots_[at] == id) return true;
    if (slots_[at] == 0) return false;
  }
}

bool Ids::add(std::uint64_t id) noexcept {
  if (id == 0 || holds(id)) return true;
  if (2 * (size_ + 1) > capacity_) {
    const std::size_t before = capacity_, now = before == 0 ? kFirstCapacity : 2 * before;
    auto* slots = static_cast<std::uint64_t*>(std::calloc(now, sizeof(std::uint64_t)));
    if (slots == nullptr) return false;
    std::uint64_t* old = slots_;
    slots_ = slots;
    capacity_ = now;
    size_ = 0;
    for (std::size_t i = 0; i < before; ++i) add(old[i]);
    std::free(old);
  }
  std::size_t at = place_of(id, capacity_);
  while (slots_[at] != 0) at = (at + 1) & (capacity_ - 1);
  slots_[at] = id;
  ++size_;
  return true;
}

std::uint64_t id_of_shrunk(std::uint64_t parent_id) noexcept {
  // Hash input: the parent's id, the child's number and its colour, both a 4-byte 0.
  const std::uint64_t numbers[] = {parent_id, 0, 0};
  const std::uint64_t sizes[] = {8, 4, 4};
  std::uint64_t first = 1, second = 1;
  for (int i = 0; i < 3; ++i) {
    first = (first ^ sizes[i]) + second;
    second ^= first;
    first = (first ^ first >> 31) * 0x9de62bbc8cef3ce3U;
    second = (second ^ second >> 32) * 0x485cd6311b599e79U;
    first += numbers[i];
  }
  const std::uint64_t mixed = (first ^ first >> 31) * 0xbac3bd562846de6bU + second;
  return (mixed ^ mixed >> 32) * 0x995a187a14e7b445U;
}

}  // namespace dynamiccl
