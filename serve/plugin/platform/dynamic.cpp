// Wraps dlopen and its kin; see old_symbols.h for why they are asked for by version.
#include "platform/dynamic.h"

#include <dlfcn.h>

#include <cstring>

#include "platform/old_symbols.h"

DYNAMICCL_OLD_SYMBOL(dladdr);
DYNAMICCL_OLD_SYMBOL(dlerror);
DYNAMICCL_OLD_SYMBOL(dlopen);
DYNAMICCL_OLD_SYMBOL(dlsym);

namespace dynamiccl {
void* open_library(const char* path) noexcept { return dlopen(path, RTLD_NOW | RTLD_LOCAL); }

void* find_symbol(void* library, const char* name) noexcept { return dlsym(library, name); }

const char* library_error() noexcept {
  const char* message = dlerror();
  return message != nullptr ? message : "no reason given";
}

bool own_directory(char* path, std::size_t capacity) noexcept {
  Dl_info info;
  if (dladdr(reinterpret_cast<void*>(&own_directory), &info) == 0 || info.dli_fname == nullptr) {
    return false;
  }
  const char* slash = std::strrchr(info.dli_fname, '/');
  const std::size_t length =
      slash != nullptr ? static_cast<std::size_t>(slash - info.dli_fname) : 0;
  if (length == 0 || length >= capacity) return false;
  std::memcpy(path, info.dli_fname, length);
  path[length] = '\0';
  return true;
}

}  // namespace dynamiccl
