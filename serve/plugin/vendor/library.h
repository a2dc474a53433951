// A vendor's tuner as a library: found as NCCL finds its own.
#pragma once

#include "nccl/tuner_abi.h"
#include "platform/clock.h"

namespace dynamiccl {

/// The vendor's functions for one version of NCCL's ABI.
struct NextPlugin {
  int version;         // of the vendor's struct, which is at most NCCL's
  const void* plugin;  // its ncclTuner_v<version>_t

  template <typename Struct>
  const Struct* as() const noexcept {
    return static_cast<const Struct*>(plugin);
  }
};

/// The library that DYNAMICCL_NEXT_TUNER names, opened once in the process, when it is first asked
/// for.
class NextLibrary {
 public:
  /// The newest of its structs up to version `abi_version`; null when there is none. Whether there
  /// is costs one line in the log.
  const NextPlugin* find(int abi_version, ncclDebugLogger_t logger) noexcept;

 private:
  static constexpr int kOldest = 2, kNewest = 6;
  void look(int abi_version, ncclDebugLogger_t logger, NextPlugin* next) noexcept;

  Mutex mutex_;
  bool is_looked_for_ = false;  // under the mutex, like the rest
  void* library_ = nullptr;
  NextPlugin by_abi_[kNewest + 1] = {};  // version 0: not looked for, -1: it has none
};

}  // namespace dynamiccl
