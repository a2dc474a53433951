// Runs once per process and kind.
#include "next/library.h"

#include <strings.h>

#include <cstdio>
#include <cstring>

#include "identity/environment.h"
#include "platform/dynamic.h"

namespace dynamiccl {
namespace {

/// Opens the plugin that `variable` names: the string itself, else libnccl-<kind>-<string>.so. Null
/// when the variable is unset or "none", or after one line in the log.
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

/// Whether a plugin's name is ours: chained to itself it would ask itself for ever. `name` is the
/// first field of every version's struct.
bool is_own(const void* plugin) noexcept {
  const char* name = *static_cast<const char* const*>(plugin);
  return name != nullptr && std::strcmp(name, "DynamICCL") == 0;
}

}  // namespace

void say_of_next(const char* variable, ncclDebugLogger_t logger, const char* text,
                 const char* detail) noexcept {
  if (logger == nullptr) return;
  char line[1024];
  const char* name = value_of(variable);
  std::snprintf(line, sizeof line, "DYNAMICCL: %s (%s): %s%s", variable,
                name != nullptr ? name : "", text, detail);
  logger(NCCL_LOG_INFO, NCCL_INIT | NCCL_TUNING, "dynamiccl", __LINE__, "%s", line);
}

const NextPlugin* NextLibrary::find(int abi_version, ncclDebugLogger_t logger) noexcept {
  const Lock lock(&mutex_);
  if (!is_looked_for_) {
    is_looked_for_ = true;
    library_ = open_next(kind_.variable, kind_.name, logger);
  }
  if (library_ == nullptr) return nullptr;
  NextPlugin& next = by_abi_[abi_version];
  if (next.version == 0) look(abi_version, logger, &next);
  return next.version > 0 ? &next : nullptr;
}

void NextLibrary::look(int abi_version, ncclDebugLogger_t logger, NextPlugin* next) noexcept {
  next->version = -1;
  for (int version = abi_version; version >= kind_.oldest && next->version < 0; --version) {
    char symbol[32];
    std::snprintf(symbol, sizeof symbol, "%s%d", kind_.symbol, version);
    const void* plugin = find_symbol(library_, symbol);
    if (plugin != nullptr) *next = {version, abi_version, plugin};
  }
  const char* problem = nullptr;
  if (next->version < 0) {
    problem = kind_.missing;
  } else if (is_own(next->plugin)) {
    problem = "that is this plugin itself";
  } else if (kind_.prepare != nullptr) {
    problem = kind_.prepare();
  }
  if (problem != nullptr) {
    next->version = -1;
    return say_of_next(kind_.variable, logger, "goes on without it: ", problem);
  }
  char version[16];
  std::snprintf(version, sizeof version, " (v%d)", next->version);
  say_of_next(kind_.variable, logger, kind_.found, version);
}

}  // namespace dynamiccl
