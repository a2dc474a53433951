// The tests of a vendor's profiler behind ours: each run in a process of its own, since a plugin is
// found only once.
#pragma once

#include <sys/wait.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "tests/calls_files.h"
#include "tests/check.h"
#include "tests/nccl_events.h"
#include "tests/vendor_events.h"

using Settings = std::vector<std::pair<const char*, std::string>>;

inline constexpr int kEverything = 0x7fff;

inline std::string g_ours, g_build;

inline std::string vendor_path(const std::string& name) {
  return g_build + "/libevents_" + name + ".so";
}

inline VendorEvents* events_of(const std::string& vendor) {
  void* library = dlopen(vendor_path(vendor).c_str(), RTLD_NOW);
  return static_cast<VendorEvents*>(dlsym(library, "vendor_events"));
}

/// Runs in a child, with these settings and no others of the plugin's.
inline void apart(const Settings& settings, const std::function<void()>& run) {
  const pid_t child = fork();
  if (child == 0) {
    g_failures = 0;
    for (const auto& [name, value] : settings) setenv(name, value.c_str(), 1);
    run();
    std::fflush(nullptr);
    _exit(g_failures != 0 ? 1 : 0);
  }
  int status = 1;
  waitpid(child, &status, 0);
  CHECK(status == 0);
}

/// A vendor's plugin, by what it exports, and the release of NCCL that loads it or ours.
struct Releases {
  const char* vendor;
  int release;
};
inline constexpr Releases kAll[] = {{"v4", 27}, {"v4", 28},  {"v4", 30},  {"v5", 28}, {"v5", 30},
                                    {"v6", 30}, {"all", 27}, {"all", 28}, {"all", 30}};

/// The events that ours asks of such a release between its bursts.
constexpr int asked_by_ours(int release) {
  return release > 27 ? ncclProfileColl | ncclProfileKernelLaunch : ncclProfileColl;
}

inline Settings chained(const std::string& vendor, int mask) {
  return {{"DYNAMICCL_NEXT_PROFILER", vendor_path(vendor)}, {"VENDOR_MASK", std::to_string(mask)}};
}

/// One collective and its kernels; whether NCCL took its times.
inline bool run_call(NcclEvents* nccl, Comm* comm) {
  std::vector<Launch> launches = nccl->call(comm, {{}});
  nccl->launch(comm, &launches);
  nccl->progress(*comm, launches[0]);
  return (launches[0].mask & ncclProfileKernelCh) != 0;
}
