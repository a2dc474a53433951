// NCCL's logger as the plugin is given it, and which threads may call it.
#pragma once

#include <cstdint>
#include <string>

#include "nccl/tuner_abi.h"

/// Who is told what the plugin does; called from any thread.
class Witness {
 public:
  virtual ~Witness() = default;
  virtual void log(int level, const std::string& line) = 0;
  /// The plugin did what NCCL does not survive, or what the project's law forbids.
  virtual void violation(const std::string& what) = 0;
  virtual void asked(std::uint64_t took_ns) = 0;
  virtual void created(std::uint64_t took_ns) = 0;
};

/// Where the logger's lines go; null drops them.
void set_witness(Witness* witness);

/// Marks the calling thread as the job's: from a thread of the plugin's own the logger must not be
/// called, since it may make CUDA calls.
void adopt_thread();

/// ncclDebugLogger_t.
void nccl_log(ncclDebugLogLevel level, unsigned long flags, const char* file, int line,
              const char* format, ...);
