// The NCCL context of a communicator in sweep mode.
#pragma once

#include <atomic>

#include "sweep/player.h"

namespace dynamiccl {

/// ncclCommAbort finalizes from another thread while a call may be inside (`src/init.cc`): then
/// nothing is freed under it, and its report is not unmapped.
struct Playing {
  Player player;
  std::atomic<int> inside{0};
  std::atomic<bool> is_closed{false};
};

class Visit {
 public:
  explicit Visit(Playing* playing) noexcept : playing_(playing) { playing_->inside.fetch_add(1); }
  ~Visit() { playing_->inside.fetch_sub(1); }
  Visit(const Visit&) = delete;
  Visit& operator=(const Visit&) = delete;
  bool entered() const noexcept { return !playing_->is_closed.load(); }

 private:
  Playing* playing_;
};

}  // namespace dynamiccl
