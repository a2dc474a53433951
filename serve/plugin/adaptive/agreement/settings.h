// The plugin's settings in mode adaptive, read from the environment when a communicator is created.
//
//   DYNAMICCL_ARTIFACT          directory of the artifact. Default: none, abstain.
//   DYNAMICCL_SYSTEM            which system of the artifact this must be. Default: whichever the
//                               machine's fingerprint is known as.
//   DYNAMICCL_COORDINATOR       host:port or [v6]:port of the directory that world rank 0 runs.
//                               Default, and `none`: local sockets, for communicators on one node.
//   DYNAMICCL_SOCKET_IFNAME     interfaces to listen on, as NCCL_SOCKET_IFNAME, which is the
//                               default.
//   DYNAMICCL_KEY_FILE          the job's key, mode 0600; needed with a coordinator.
//   DYNAMICCL_RUN_DIR           where local sockets lie. Default: $XDG_RUNTIME_DIR/dynamiccl, else
//                               /tmp/dynamiccl-UID.
//   DYNAMICCL_DECISION_LIMIT_S  seconds that a rank that has voted may stop at its horizon. Default
//                               60.
//   DYNAMICCL_GATHER_LIMIT_S    seconds that the leader waits for all ranks to come. Default 120.
//   DYNAMICCL_KILL_FILE         while it exists NCCL's own choice stands. Default: `kill` in the
//                               artifact's directory.
//   DYNAMICCL_LOOK_INTERVAL_S   seconds between two looks at kill file and artifact. Default 0.5.
//   DYNAMICCL_METRICS_DIR       where counters are written, a file a rank. Default: nowhere.
//   DYNAMICCL_BRAIN_SOCKET      the brain is the process that listens there.
//   DYNAMICCL_ADAPT_INTERVAL_S  seconds from one decision of the brain to the next. Default 10.
//   DYNAMICCL_PROBE_CALLS       calls between two probes of NCCL's own choice; more where probes
//                               take more than kProbeCalls. Default 6400, so that probes are at
//                               most 1 % of the calls; 0: none, and no guard.
//   DYNAMICCL_STOP_PERCENT      maximum share of the time that calls wait at stops for probes
//                               and for the brain's decisions. Default 0.1. Not limited: the first
//                               table, new artifacts and kill files, and waits counted too late.
//   NCCL_SOCKET_IFNAME          stands in for DYNAMICCL_SOCKET_IFNAME.
//   XDG_RUNTIME_DIR             holds DYNAMICCL_RUN_DIR by default.
#pragma once

#include <cstdint>

#include "adaptive/agreement/rules.h"

namespace dynamiccl {

/// Calls that a probe of NCCL's own choice may take in DYNAMICCL_PROBE_CALLS.
inline constexpr std::uint64_t kProbeCalls = 64;

/// A duration in seconds, fractions allowed; `fallback_ns` when unset or invalid.
std::uint64_t duration_ns(const char* variable, std::uint64_t fallback_ns) noexcept;

struct Settings {
  /// Copies the values: the environment may change. False: out of memory.
  bool read() noexcept;
  Settings() = default;
  ~Settings();
  Settings(const Settings&) = delete;
  Settings& operator=(const Settings&) = delete;

  // Null where not set.
  char* artifact = nullptr;
  char* system = nullptr;
  char* coordinator = nullptr;  // null: none
  char* key_file = nullptr;
  char* run_dir = nullptr;
  char* kill_file = nullptr;
  char* metrics_dir = nullptr;
  char* brain_socket = nullptr;
  char* interfaces = nullptr;
  std::uint64_t decision_limit_ns = 0;
  Timing timing;
  std::uint64_t adapt_interval_ns = 0;
  std::uint64_t look_interval_ns = 0;
  std::uint64_t probe_calls = 0;
  std::uint64_t stop_ppm = 0;
};

}  // namespace dynamiccl
