// Keeps foreign code (a brain's library) from running while the process exits.
//
// exit() destroys static objects, the latest made first, while other threads go on. Torch makes
// many of its own at their first use: later than anything that was registered when it was loaded.
#pragma once

namespace dynamiccl {

/// Holds the gate open: exit() waits for its end, 2 s at most. One at a time.
class BeforeExit {
 public:
  BeforeExit() noexcept;
  ~BeforeExit();
  BeforeExit(const BeforeExit&) = delete;
  BeforeExit& operator=(const BeforeExit&) = delete;

  /// Whether the process goes on. If not, nothing may be done any more.
  bool may_begin() const noexcept { return may_begin_; }

 private:
  bool may_begin_;
};

/// On a thread of the job's: when it is the process's first, exit() called on it closes the gate
/// before all else. Elsewhere the gate closes after what was made within the latest BeforeExit.
void watch_exit() noexcept;

}  // namespace dynamiccl
