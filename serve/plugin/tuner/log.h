// Log of decisions: one JSON line for each communicator in DYNAMICCL_LOG_DIR, written by a thread
// of the coordinator's process, and one line a job on stderr, with or without NCCL_DEBUG.
//
//   DYNAMICCL_LOG_DIR  where the coordinator appends a JSON line for each communicator. Default:
//                      nowhere.
#pragma once

#include "tuner/coordinator.h"

namespace dynamiccl {

/// Starts the writing thread, once a process.
void start_log() noexcept;

/// Never blocks, whether files are slow or a terminal or pipe is full.
void log_decision(const Coordinator::Decided& decided) noexcept;

/// Whether everything logged has been written or dropped.
bool log_is_written() noexcept;

}  // namespace dynamiccl
