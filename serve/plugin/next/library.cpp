// Runs once per process and kind.
#include "next/library.h"

#include <strings.h>

#include <cstdio>
#include <cstring>

#include "identity/environment.h"
#include "platform/dynamic.h"

namespace dynamiccl {

void say_of_next(const char* variable, ncclDebugLogger_t logger, const char* text,
                 const char* detail) noexcept {
  if (logger == nullptr) return;
  char line[1024];
  const char* name = value_of(variable);
  std::snprintf(line, sizeof line, "DYNAMICCL: %s (%s): %s%s", variable,
                name != nullptr ? name : "", text, detail);
  logger(NCCL_LOG_INFO, NCCL_INIT | NCCL_TUNING, "dynamiccl", __LINE__, "%s", line);
}

void* open_next(const char* variable, const char* kind, ncclDebugLogger_t logger) noexcept {
  const char* name = value_of(variable);
  if (name == nullptr || strcasecmp(name, "none") == 0) return nullptr;
  void* library = open_library(name);
  if (library != nullptr) return library;
  char reason[768];
  std::snprintf(reason, sizeof reason, "%s", library_error());
  const std::size_t length = std::strlen(name);
  const bool is_soname = std::strncmp(name, "lib", 3) == 0 && length >= 3 &&
                         std::strcmp(name + length - 3, ".so") == 0;
  char soname[512];
  const int size = std::snprintf(soname, sizeof soname, "libnccl-%s-%s.so", kind, name);
  if (std::strchr(name, '/') == nullptr && !is_soname && size > 0 &&
      static_cast<std::size_t>(size) < sizeof soname) {
    library = open_library(soname);
    if (library != nullptr) return library;
    std::snprintf(reason, sizeof reason, "%s", library_error());
  }
  say_of_next(variable, logger, "goes on without it: ", reason);
  return nullptr;
}

bool is_own_name(const char* name) noexcept {
  return name != nullptr && std::strcmp(name, "DynamICCL") == 0;
}

}  // namespace dynamiccl
