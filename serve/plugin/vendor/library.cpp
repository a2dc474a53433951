// Runs once per process.
#include "vendor/library.h"

#include <strings.h>

#include <cstdio>
#include <cstring>

#include "identity/environment.h"
#include "platform/dynamic.h"

namespace dynamiccl {
namespace {

constexpr char kVariable[] = "DYNAMICCL_NEXT_TUNER";

/// One line about the plugin.
void say_of_next(ncclDebugLogger_t logger, const char* text, const char* detail) noexcept {
  if (logger == nullptr) return;
  char line[1024];
  const char* name = value_of(kVariable);
  std::snprintf(line, sizeof line, "DYNAMICCL: %s (%s): %s%s", kVariable,
                name != nullptr ? name : "", text, detail);
  logger(NCCL_LOG_INFO, NCCL_INIT | NCCL_TUNING, "dynamiccl", __LINE__, "%s", line);
}

/// Opens it: the string itself, else libnccl-tuner-<string>.so. Null when the variable is unset or
/// "none", or after one line in the log.
void* open_next(ncclDebugLogger_t logger) noexcept {
  const char* name = value_of(kVariable);
  if (name == nullptr || strcasecmp(name, "none") == 0) return nullptr;
  void* library = open_library(name);
  if (library != nullptr) return library;
  char reason[768];
  std::snprintf(reason, sizeof reason, "%s", library_error());
  const std::size_t length = std::strlen(name);
  const bool is_soname = std::strncmp(name, "lib", 3) == 0 && length >= 3 &&
                         std::strcmp(name + length - 3, ".so") == 0;
  char soname[512];
  const int size = std::snprintf(soname, sizeof soname, "libnccl-tuner-%s.so", name);
  if (std::strchr(name, '/') == nullptr && !is_soname && size > 0 &&
      static_cast<std::size_t>(size) < sizeof soname) {
    library = open_library(soname);
    if (library != nullptr) return library;
    std::snprintf(reason, sizeof reason, "%s", library_error());
  }
  say_of_next(logger, "goes on without it: ", reason);
  return nullptr;
}

/// Whether a plugin's name is ours: a chain to itself would never end. `name` is the first field of
/// every version's struct.
bool is_own(const void* plugin) noexcept {
  const char* name = *static_cast<const char* const*>(plugin);
  return name != nullptr && std::strcmp(name, "DynamICCL") == 0;
}

}  // namespace

const NextPlugin* NextLibrary::find(int abi_version, ncclDebugLogger_t logger) noexcept {
  const Lock lock(&mutex_);
  if (!is_looked_for_) {
    is_looked_for_ = true;
    library_ = open_next(logger);
  }
  if (library_ == nullptr) return nullptr;
  NextPlugin& next = by_abi_[abi_version];
  if (next.version == 0) look(abi_version, logger, &next);
  return next.version > 0 ? &next : nullptr;
}

void NextLibrary::look(int abi_version, ncclDebugLogger_t logger, NextPlugin* next) noexcept {
  next->version = -1;
  for (int version = abi_version; version >= kOldest && next->version < 0; --version) {
    char symbol[32];
    std::snprintf(symbol, sizeof symbol, "ncclTunerPlugin_v%d", version);
    const void* plugin = find_symbol(library_, symbol);
    if (plugin != nullptr) *next = {version, plugin};
  }
  if (next->version < 0 || is_own(next->plugin)) {
    say_of_next(logger, "goes on without it: ",
                next->version < 0 ? "it exports no tuner that this NCCL takes"
                                  : "that is this plugin itself");
    next->version = -1;
    return;
  }
  char version[16];
  std::snprintf(version, sizeof version, " (v%d)", next->version);
  say_of_next(logger, "is asked first on every call", version);
}

}  // namespace dynamiccl
