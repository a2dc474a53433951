// A malformed line is simply not found by look-ups.
#include "identity/index.h"

#include <cstdio>
#include <cstring>

#include "trusted/file.h"

namespace dynamiccl {
namespace {

constexpr char kFirstLine[] = "dynamiccl-index\t1\n";

bool begins_with(const char* text, const char* beginning) noexcept {
  return std::strncmp(text, beginning, std::strlen(beginning)) == 0;
}

const char* next_line(const char* line) noexcept { return std::strchr(line, '\n') + 1; }

/// Length of a system's name; 0 if it is invalid: it becomes part of a path.
std::size_t name_bytes(const char* text) noexcept {
  if (std::strchr("._-", text[0]) != nullptr) return 0;
  const std::size_t size = std::strspn(text, "abcdefghijklmnopqrstuvwxyz0123456789._-");
  return size < kSystemBytes ? size : 0;
}

const char* why_not(const std::uint8_t* bytes, std::size_t size) noexcept {
  if (size > kMaxIndexBytes) return "it is too long";
  if (size == 0 || bytes[size - 1] != '\n') return "it is cut off";
  if (std::memchr(bytes, '\0', size) != nullptr) return "it is no text";
  constexpr std::size_t kFirstBytes = sizeof kFirstLine - 1;
  const bool is_index = size >= kFirstBytes && std::memcmp(bytes, kFirstLine, kFirstBytes) == 0;
  return is_index ? nullptr : "it is not a DynamICCL index of format version 1";
}

}  // namespace

const char* PluginIndex::load(const char* path) noexcept {
  auto* bytes = reinterpret_cast<std::uint8_t*>(text_);  // it is decoded where it lies
  std::size_t size = 0;
  const char* problem = read_trusted(path, bytes, kMaxIndexBytes, &size);
  if (problem == nullptr) return decode(bytes, size);
  text_[0] = '\0';
  return problem;
}

const char* PluginIndex::decode(const std::uint8_t* bytes, std::size_t size) noexcept {
  const char* problem = why_not(bytes, size);
  if (problem != nullptr) size = 0;
  std::memmove(text_, bytes, size);
  text_[size] = '\0';
  sha256_hex(text_, size, artifact_hash_);
  return problem;
}

bool PluginIndex::find_system(const char* fingerprint,
                              char (&system)[kSystemBytes]) const noexcept {
  int num_found = 0;
  for (const char* line = text_; *line != '\0'; line = next_line(line)) {
    if (!begins_with(line, "system\t")) continue;
    const char* name = line + std::strlen("system\t");
    const std::size_t size = name_bytes(name);
    const char* machine = name + size + 1;
    if (size == 0 || machine[-1] != '\t' || !begins_with(machine, fingerprint)) continue;
    if (machine[std::strlen(fingerprint)] != '\n') continue;
    std::snprintf(system, sizeof system, "%.*s", static_cast<int>(size), name);
    ++num_found;
  }
  return num_found == 1;  // one machine, two systems: then it is known as neither
}

bool PluginIndex::table_hash(const char* system, std::size_t num_nodes, std::size_t num_ranks,
                             char (&hash)[kHexBytes]) const noexcept {
  char keys[kSystemBytes + 64];
  std::snprintf(keys, sizeof keys, "table\t%s\t%zu\t%zu\t", system, num_nodes, num_ranks);
  return find(keys, hash, sizeof hash);
}

bool PluginIndex::find(const char* keys, char* value, std::size_t capacity) const noexcept {
  const char* found = nullptr;
  for (const char* line = text_; *line != '\0'; line = next_line(line)) {
    if (!begins_with(line, keys)) continue;
    if (found != nullptr) return false;
    found = line + std::strlen(keys);
  }
  const std::size_t size = found != nullptr ? std::strcspn(found, "\t\n") : capacity;
  if (size >= capacity) return false;
  std::memcpy(value, found, size);
  value[size] = '\0';
  return true;
}

}  // namespace dynamiccl
