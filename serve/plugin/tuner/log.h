// What became of each communicator: one JSON line in DYNAMICCL_LOG_DIR, written by the
// coordinator's process on a thread of its own, and one line a job on stderr, with or without
// NCCL_DEBUG.
//
//   DYNAMICCL_LOG_DIR  where the coordinator appends a JSON line for each communicator. Default:
//                      nowhere.
#pragma once

#include "tuner/coordinator.h"

namespace dynamiccl {

/// Starts the writing thread. Once a process.
void start_log() noexcept;

/// Never waits: neither for a file nor for a terminal or pipe that is full.
void log_decision(const Coordinator::Decided& decided) noexcept;

/// Whether all that was logged has been written, or given up.
bool log_is_written() noexcept;

}  // namespace dynamiccl
