// The ids of the communicators that a process has seen, and whether any may be two communicators'.
//
// NCCL 2.27 to 2.30 gives a communicator that `ncclCommShrink` made an id that depends on its
// parent's alone (`init.cc`, ncclCommInitChildComm: child number and colour are both 0), so
// disjoint shrinks of one parent share an id. A process that has seen a shrink says so in all its
// later votes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dynamiccl {

/// The id of a communicator that was shrunk from another one: NCCL's hash (2.30.7 `bitops.h:502`).
std::uint64_t id_of_shrunk(std::uint64_t parent_id) noexcept;

/// A set of ids, and of those that a shrink of each would have. Not for several threads at once.
class Ids {
 public:
  Ids() noexcept = default;
  ~Ids();
  Ids(const Ids& other) noexcept;
  Ids& operator=(const Ids&) = delete;

  /// Take note of a communicator; whether from now on an id may be two communicators'.
  bool note(std::uint64_t id) noexcept;

 private:
  bool holds(std::uint64_t id) const noexcept;
  bool add(std::uint64_t id) noexcept;

  std::uint64_t* slots_ = nullptr;  // 0: free
  std::size_t capacity_ = 0;        // a power of two
  std::size_t size_ = 0;
  bool may_repeat_ = false;
};

}  // namespace dynamiccl
