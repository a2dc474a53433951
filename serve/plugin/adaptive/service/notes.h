// Messages of a rank to itself: delivered by the loop, so that nobody is called back inside a call
// of his own.
#pragma once

#include <cstdint>

#include "adaptive/agreement/agreement.h"

namespace dynamiccl {

class Notes {
 public:
  /// Copies the message; one that finds no memory will be said again.
  void add(Agreement* to, const Message& message) noexcept;
  void deliver(std::uint64_t now_ns) noexcept;

 private:
  struct Note;

  Note* notes_ = nullptr;
  Note** end_ = &notes_;
};

}  // namespace dynamiccl
