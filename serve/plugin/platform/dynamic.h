// Shared libraries, without a symbol newer than glibc 2.28.
#pragma once

namespace dynamiccl {

/// Open with RTLD_NOW | RTLD_LOCAL; null when it cannot be: library_error() says why.
void* open_library(const char* path) noexcept;

void* find_symbol(void* library, const char* name) noexcept;

/// Why the latest open_library of this thread failed; never null.
const char* library_error() noexcept;

}  // namespace dynamiccl
