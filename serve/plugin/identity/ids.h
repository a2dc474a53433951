// The ids of the communicators that a process has seen, and whether any may be two communicators'.
//
// NCCL 2.27 to 2.30 gives all shrinks of one parent one id, and so their children (2.30.7
// `init.cc:1875-1880,3143-3152`: child number and colour are both 0). A first shrink is known by
// its parent's id. What is made of it later cannot be told from a communicator of ncclCommInitRank:
// its id is a hash, of a colour among others. So after a first shrink all later communicators of
// the process abstain. Ranks that join by ncclCommGrow have seen no shrink: in mode table the
// others vote the problem; mode adaptive decides nothing without the others.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dynamiccl {

/// The id of a communicator that was shrunk from another one: NCCL's hash (2.30.7 `bitops.h:502`)
/// of the parent's id, the child's number and its colour, both a 4-byte 0.
inline std::uint64_t id_of_shrunk(std::uint64_t parent_id) noexcept {
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

/// A hash set of the ids that shrinks of the noted ones would have, 2 MiB, of which a static one
/// takes memory for the pages that are used alone. Not for several threads at once.
struct Ids {
  static constexpr std::size_t kCapacity = 1U << 18, kMost = kCapacity / 2;

  /// Takes note of a communicator (0: of none); whether from now on an id may be two
  /// communicators': one was shrunk, or there have been too many to know.
  bool note(std::uint64_t id) noexcept {
    if (id == 0 || may_repeat) return may_repeat;
    std::uint64_t* shrunk = place_of(id_of_shrunk(id));
    may_repeat = *place_of(id) == id || count == kMost;
    count += *shrunk == 0 ? 1 : 0;
    *shrunk = id_of_shrunk(id);
    return may_repeat;
  }

  /// Where an id is, or would be; ids are hashes already.
  std::uint64_t* place_of(std::uint64_t id) noexcept {
    std::size_t at = static_cast<std::size_t>(id * 0x9e3779b97f4a7c15U >> 32);
    while (slots[at % kCapacity] != 0 && slots[at % kCapacity] != id) ++at;
    return &slots[at % kCapacity];
  }

  std::uint64_t slots[kCapacity] = {};  // 0: free
  std::size_t count = 0;
  bool may_repeat = false;
};

}  // namespace dynamiccl
