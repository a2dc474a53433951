// Wraps dlopen and its kin; see old_symbols.h for why they are asked for by version.
#include "platform/dynamic.h"

#include <dlfcn.h>

#include "platform/old_symbols.h"

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

}  // namespace dynamiccl
