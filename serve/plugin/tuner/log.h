// What became of each communicator: one JSON line in DYNAMICCL_LOG_DIR, written by the
// coordinator's process on a thread of its own, and one line a job on stderr, with or without
// NCCL_DEBUG.
#pragma once

#include "tuner/coordinator.h"

namespace dynamiccl {

/// Starts the writing thread, where DYNAMICCL_LOG_DIR is set.
void start_log() noexcept;

/// Never waits for a file.
void log_decision(const Coordinator::Decided& decided) noexcept;

}  // namespace dynamiccl
