// Shared libraries, without a symbol newer than glibc 2.28.
#pragma once

#include <cstddef>

namespace dynamiccl {

/// Open with RTLD_NOW | RTLD_LOCAL; null when it cannot be: library_error() says why.
void* open_library(const char* path) noexcept;

void* find_symbol(void* library, const char* name) noexcept;

/// Why the latest open_library of this thread failed; never null.
const char* library_error() noexcept;

/// The function or variable `name` in any library that this process has loaded, also in one that
/// was loaded for itself alone (RTLD_LOCAL); null when none has it.
void* find_loaded_symbol(const char* name) noexcept;

/// What ncclGetVersion of the loaded NCCL says, 22809 for 2.28.9; 0 where none is loaded.
int loaded_nccl_version() noexcept;

/// The same of the NCCL whose function (its logger) this is: a process may have loaded two. Of the
/// first that is loaded where the function's own library has no ncclGetVersion.
int nccl_version_of(void (*function)()) noexcept;

/// The path of the library that a function lies in; empty when unknown.
const char* library_of(void (*function)()) noexcept;

/// The directory that this library was loaded from, without the last slash. False when unknown.
bool own_directory(char* path, std::size_t capacity) noexcept;

}  // namespace dynamiccl
