// A vendor's plugin as a library: found as NCCL finds its own.
#pragma once

#include "nccl/tuner_abi.h"

namespace dynamiccl {

/// Opens the plugin that `variable` names: the string itself, else libnccl-<kind>-<string>.so. Null
/// when the variable is unset or "none", or after one line in the log.
void* open_next(const char* variable, const char* kind, ncclDebugLogger_t logger) noexcept;

/// One line about the plugin that `variable` names.
void say_of_next(const char* variable, ncclDebugLogger_t logger, const char* text,
                 const char* detail) noexcept;

/// Whether a plugin's name is ours: chained to itself it would ask itself for ever.
bool is_own_name(const char* name) noexcept;

}  // namespace dynamiccl
