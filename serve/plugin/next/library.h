// A vendor's plugin as a library: found as NCCL finds its own.
#pragma once

#include "nccl/tuner_abi.h"
#include "platform/threads.h"

namespace dynamiccl {

/// The vendor's functions for one version of NCCL's ABI: the struct itself, and which it is.
struct NextPlugin {
  int version;         // of the vendor's struct: at most `abi_version`
  int abi_version;     // that NCCL called us by
  const void* plugin;  // its ncclTuner_v<version>_t or ncclProfiler_v<version>_t

  template <typename Struct>
  const Struct* as() const noexcept {
    return static_cast<const Struct*>(plugin);
  }
};

/// A vendor's plugin of one kind, opened once in the process, when it is first asked for.
class NextLibrary {
 public:
  struct Kind {
    const char* variable;               // that names it
    const char* name;                   // as in libnccl-<name>-<string>.so
    const char* symbol;                 // of a struct, up to its version
    int oldest;                         // version
    const char* missing;                // what is said when it has none of these,
    const char* found;                  // and when it has one
    const char* (*prepare)() noexcept;  // what else it takes: null, or why not; may be null
  };
  explicit constexpr NextLibrary(const Kind& kind) noexcept : kind_(kind) {}

  /// The newest of its structs up to version `abi_version`; null when there is none. Whether there
  /// is costs one line in the log.
  const NextPlugin* find(int abi_version, ncclDebugLogger_t logger) noexcept;

 private:
  static constexpr int kNewest = 6;
  void look(int abi_version, ncclDebugLogger_t logger, NextPlugin* next) noexcept;

  const Kind kind_;
  Mutex mutex_;
  bool is_looked_for_ = false;  // under the mutex, like the rest
  void* library_ = nullptr;
  NextPlugin by_abi_[kNewest + 1] = {};  // version 0: not looked for, -1: it has none
};

/// One line about the plugin that `variable` names.
void say_of_next(const char* variable, ncclDebugLogger_t logger, const char* text,
                 const char* detail) noexcept;

}  // namespace dynamiccl
