// Loads the brain's functions, and checks their results.
#include "brain/brain.h"

#include <cstdio>

#include "brain/reason.h"
#include "brain/socket_brain.h"
#include "platform/dynamic.h"

namespace dynamiccl {
namespace {

constexpr std::size_t kPathBytes = 4096;

/// After a call into foreign code `reason` may contain anything.
void take_reason(char* reason, std::size_t reason_bytes) noexcept {
  if (reason == nullptr || reason_bytes == 0) return;
  reason[reason_bytes - 1] = '\0';
  make_printable(reason);
  if (reason[0] == '\0') say(reason, reason_bytes, "it gives no reason");
}

}  // namespace

bool BrainHandle::open(const dynamiccl_brain_config& config, char* reason,
                       std::size_t reason_bytes) noexcept {
  if (config.socket != nullptr) return open_kind(socket_brain(), config, reason, reason_bytes);
  char path[kPathBytes];
  if (!own_directory(path, sizeof path)) {
    say(reason, reason_bytes, "the plugin does not know its own directory");
    return false;
  }
  char library[kPathBytes];
  const int length = std::snprintf(library, sizeof library, "%s/%s", path, kTorchRuntime);
  if (length < 0 || static_cast<std::size_t>(length) >= sizeof library) {
    say(reason, reason_bytes, "the plugin's path is too long");
    return false;
  }
  return open_from(library, config, reason, reason_bytes);
}

bool BrainHandle::open_from(const char* path, const dynamiccl_brain_config& config, char* reason,
                            std::size_t reason_bytes) noexcept {
  void* library = open_library(path);
  if (library == nullptr) {
    say(reason, reason_bytes, "%s", library_error());
    return false;
  }
  using Get = const dynamiccl_brain* (*)();
  const auto get = reinterpret_cast<Get>(find_symbol(library, DYNAMICCL_BRAIN_SYMBOL));
  if (get == nullptr) {
    say(reason, reason_bytes, "%s has no " DYNAMICCL_BRAIN_SYMBOL, path);
    return false;
  }
  return open_kind(get(), config, reason, reason_bytes);
}

bool BrainHandle::open_kind(const dynamiccl_brain* kind, const dynamiccl_brain_config& config,
                            char* reason, std::size_t reason_bytes) noexcept {
  close();
  if (kind == nullptr || kind->version != DYNAMICCL_BRAIN_VERSION || kind->name == nullptr ||
      kind->open == nullptr || kind->decide == nullptr || kind->close == nullptr) {
    say(reason, reason_bytes, "the brain's library is of another release");
    return false;
  }
  void* brain = nullptr;
  if (kind->open(&config, &brain, reason, reason_bytes) != 0) {
    take_reason(reason, reason_bytes);
    return false;
  }
  kind_ = kind;
  brain_ = brain;
  return true;
}

bool BrainHandle::decide(const dynamiccl_history& history, std::uint8_t* table,
                         std::size_t capacity, std::size_t* table_bytes, char* reason,
                         std::size_t reason_bytes) noexcept {
  *table_bytes = 0;
  if (kind_ == nullptr) {
    say(reason, reason_bytes, "no brain is open");
    return false;
  }
  if (kind_->decide(brain_, &history, table, capacity, table_bytes, reason, reason_bytes) != 0) {
    *table_bytes = 0;
    take_reason(reason, reason_bytes);
    return false;
  }
  if (*table_bytes > capacity) {
    *table_bytes = 0;
    say(reason, reason_bytes, "the brain claims a longer table than there can be");
    return false;
  }
  return true;
}

void BrainHandle::close() noexcept {
  if (kind_ != nullptr) kind_->close(brain_);
  kind_ = nullptr;
  brain_ = nullptr;
}

}  // namespace dynamiccl
