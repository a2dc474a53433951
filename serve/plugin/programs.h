// What the programs beside a job share (prepare/, arbiter/): texts of the environment and of files.
#pragma once

#include <string>

#include "file.h"
#include "identity/environment.h"

namespace dynamiccl {

/// The value of an environment variable; empty where it is not set.
inline std::string text_of(const char* variable) { return value_of(variable, ""); }

/// Of an artifact's plugin.index (serve/artifact.py), and its first line.
inline constexpr std::size_t kMostIndexBytes = 65'536;
inline constexpr const char* kIndexVersion = "dynamiccl-index\t1\n";

/// All of a file that may steer jobs, at most so many bytes. Null, or why not.
inline const char* read_ours(const std::string& path, std::size_t most, std::string* text,
                             unsigned forbidden = S_IWGRP | S_IWOTH) {
  const File file(path.c_str(), O_RDONLY | O_NONBLOCK | O_NOFOLLOW);
  if (const char* why = why_not_ours(file.descriptor(), S_IFREG, forbidden)) return why;
  text->resize(most + 1);
  const ssize_t size = file.read_all(text->data(), text->size());
  if (size < 0) return "it cannot be read";
  text->resize(static_cast<std::size_t>(size));
  return text->size() > most ? "it is too long" : nullptr;
}

inline std::string hex_of(std::uint64_t number) {
  char text[20];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(number));
  return text;
}

}  // namespace dynamiccl
