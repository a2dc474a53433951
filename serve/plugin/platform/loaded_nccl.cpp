// Wraps dlopen and its kin; see old_symbols.h for why they are asked for by version.
#include "platform/loaded_nccl.h"

#include <dlfcn.h>
#include <link.h>

#include <atomic>
#include <cstdlib>
#include <cstring>

#include "platform/old_symbols.h"

DYNAMICCL_OLD_SYMBOL(dlclose);
DYNAMICCL_OLD_SYMBOL(dlopen);
DYNAMICCL_OLD_SYMBOL(dlsym);

namespace dynamiccl {
namespace {

constexpr std::size_t kNamesBytes = 256 * 1024;

/// The paths of all loaded libraries, each with its zero. They are opened only afterwards: whoever
/// walks the list holds a lock that dlopen takes in another order.
struct Names {
  char* text;
  std::size_t length;
};

int keep_name(dl_phdr_info* library, std::size_t, void* argument) {
  auto* names = static_cast<Names*>(argument);
  const std::size_t length = std::strlen(library->dlpi_name) + 1;
  if (names->length + length > kNamesBytes) return 1;
  std::memcpy(names->text + names->length, library->dlpi_name, length);
  names->length += length;
  return 0;
}

void* find_in(const char* library, const char* name) noexcept {
  void* handle = dlopen(library[0] != '\0' ? library : nullptr, RTLD_LAZY | RTLD_NOLOAD);
  if (handle == nullptr) return nullptr;
  void* found = dlsym(handle, name);
  dlclose(handle);  // only the count that RTLD_NOLOAD added
  return found;
}

int version_by(void* symbol) noexcept {
  int version = 0;
  if (symbol == nullptr || reinterpret_cast<int (*)(int*)>(symbol)(&version) != 0) return 0;
  return version;
}

/// The function's address in any loaded library, including those loaded with RTLD_LOCAL; null when
/// none has it.
void* find_loaded_symbol(const char* name) noexcept {
  Names names = {static_cast<char*>(std::malloc(kNamesBytes)), 0};
  if (names.text == nullptr) return nullptr;
  dl_iterate_phdr(keep_name, &names);
  void* found = nullptr;
  for (std::size_t i = 0; i < names.length && found == nullptr;
       i += std::strlen(names.text + i) + 1) {
    found = find_in(names.text + i, name);
  }
  std::free(names.text);
  return found;
}

}  // namespace

int loaded_nccl_version() noexcept {
  static std::atomic<int> version{0};  // any thread finds the same
  if (version.load() == 0) version.store(version_by(find_loaded_symbol("ncclGetVersion")));
  return version.load();
}

}  // namespace dynamiccl
