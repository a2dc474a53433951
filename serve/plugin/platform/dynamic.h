// Shared libraries, without a symbol newer than glibc 2.28 (old_symbols.h).
#pragma once

#include <dlfcn.h>

#include "platform/old_symbols.h"

DYNAMICCL_OLD_SYMBOL(dlerror);
DYNAMICCL_OLD_SYMBOL(dlopen);
DYNAMICCL_OLD_SYMBOL(dlsym);

namespace dynamiccl {

/// Null when it cannot be opened: library_error() says why.
inline void* open_library(const char* path) noexcept { return dlopen(path, RTLD_NOW | RTLD_LOCAL); }

inline void* find_symbol(void* library, const char* name) noexcept { return dlsym(library, name); }

/// Why the latest open_library of this thread failed; never null.
inline const char* library_error() noexcept {
  const char* message = dlerror();
  return message != nullptr ? message : "no reason given";
}

}  // namespace dynamiccl
