// Reads and copies environment variables; values are interpreted where they are used.
#include "adaptive/agreement/settings.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

#include "identity/environment.h"
#include "profiler/bursts.h"

namespace dynamiccl {
namespace {

constexpr std::uint64_t kSecond = 1'000'000'000;

char* copy(const char* text) noexcept {
  if (text == nullptr) return nullptr;
  const std::size_t size = std::strlen(text) + 1;
  auto* copied = static_cast<char*>(std::malloc(size));
  if (copied != nullptr) std::memcpy(copied, text, size);
  return copied;
}

/// `directory` + `tail`, as a copy.
char* joined(const char* directory, const char* tail) noexcept {
  if (directory == nullptr) return nullptr;
  const std::size_t size = std::strlen(directory) + std::strlen(tail) + 1;
  auto* path = static_cast<char*>(std::malloc(size));
  if (path != nullptr) std::snprintf(path, size, "%s%s", directory, tail);
  return path;
}

}  // namespace

std::uint64_t duration_ns(const char* variable, std::uint64_t fallback_ns) noexcept {
  const char* text = value_of(variable);
  if (text == nullptr) return fallback_ns;
  char* end = nullptr;
  const double seconds = std::strtod(text, &end);
  const bool is_duration = *end == '\0' && seconds >= 0.0 && seconds <= 1e6;
  return is_duration ? static_cast<std::uint64_t>(seconds * 1e9) : fallback_ns;
}

bool Settings::read() noexcept {
  artifact = copy(value_of("DYNAMICCL_ARTIFACT"));
  system = copy(value_of("DYNAMICCL_SYSTEM"));
  const char* where = value_of("DYNAMICCL_COORDINATOR");
  if (where != nullptr && std::strcmp(where, "none") != 0) coordinator = copy(where);
  key_file = copy(value_of("DYNAMICCL_KEY_FILE"));
  brain_socket = copy(value_of("DYNAMICCL_BRAIN_SOCKET"));
  metrics_dir = copy(value_of("DYNAMICCL_METRICS_DIR"));
  const char* own = value_of("DYNAMICCL_SOCKET_IFNAME");
  interfaces = copy(own != nullptr ? own : value_of("NCCL_SOCKET_IFNAME"));

  run_dir = copy(value_of("DYNAMICCL_RUN_DIR"));
  if (run_dir == nullptr) run_dir = joined(value_of("XDG_RUNTIME_DIR"), "/dynamiccl");
  if (run_dir == nullptr) {
    char path[64];
    std::snprintf(path, sizeof path, "/tmp/dynamiccl-%ld", static_cast<long>(geteuid()));
    run_dir = copy(path);
  }
  const char* kill = value_of("DYNAMICCL_KILL_FILE");
  kill_file = kill != nullptr ? copy(kill) : joined(artifact, "/kill");

  decision_limit_ns = duration_ns("DYNAMICCL_DECISION_LIMIT_S", 60 * kSecond);
  timing.gather_ns = duration_ns("DYNAMICCL_GATHER_LIMIT_S", timing.gather_ns);
  look_interval_ns = duration_ns("DYNAMICCL_LOOK_INTERVAL_S", kSecond / 2);
  adapt_interval_ns = duration_ns("DYNAMICCL_ADAPT_INTERVAL_S", 10 * kSecond);
  if (!parse_number(value_of("DYNAMICCL_PROBE_CALLS"), &probe_calls)) probe_calls = 6400;
  const char* stops = value_of("DYNAMICCL_STOP_PERCENT");
  const int stop_parts = sample_ppm_of(stops != nullptr ? stops : "0.1");
  stop_ppm = stop_parts > 0 ? static_cast<std::uint64_t>(stop_parts) : 0;
  return run_dir != nullptr;
}

Settings::~Settings() {
  for (char* text : {artifact, system, coordinator, key_file, run_dir, kill_file, metrics_dir,
                     brain_socket, interfaces}) {
    std::free(text);
  }
}

}  // namespace dynamiccl
