// Messages of a rank to itself: delivered by the loop, so that no callback runs inside a call of
// its receiver.
#pragma once

#include <cstdint>

#include "adaptive/agreement/agreement.h"

namespace dynamiccl {

class Notes {
 public:
  /// Copies the message; dropped when out of memory (it will be repeated).
  void add(Agreement* to, const Message& message) noexcept;
  void deliver(std::uint64_t now_ns) noexcept;

 private:
  struct Note;

  Note* notes_ = nullptr;
  Note** end_ = &notes_;
};

}  // namespace dynamiccl
