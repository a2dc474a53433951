// How NCCL 2.24 to 2.30 load a plugin and call it: which structs a release takes, with that
// version's arguments and event descriptors (`src/misc/tuner.cc`, `src/plugin/*.cc`).
#pragma once

#include <dlfcn.h>

#include <cstdarg>
#include <cstdio>
#include <mutex>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "nccl/profiler_abi.h"
#include "nccl/tuner_abi.h"
#include "tests/job/board.h"
#include "vocabulary.h"

/// From a thread of the plugin's own the logger must not be called: it may make CUDA calls.
inline thread_local bool t_is_ours = false;

template <typename Body>
std::thread start_thread(Body body) {
  return std::thread([body] {
    t_is_ours = true;
    body();
  });
}

/// ncclDebugLogger_t.
inline void nccl_log(ncclDebugLogLevel level, unsigned long, const char*, int, const char* format,
                     ...) {
  char line[8192];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);
  if (!t_is_ours) complain("logged from a thread of its own: " + std::string(line));
  tell('L', (level <= NCCL_LOG_WARN ? "WARN " : "INFO ") + std::string(line));
}

/// A plugin file of the process: opened with the first communicator, closed with the last.
class Plugin {
 public:
  /// Whether it has a struct of any version from 4 on that the release takes.
  bool open() {
    const std::lock_guard<std::mutex> lock(mutex_);
    const char* path = std::getenv(variable_);
    if (path == nullptr || newest_ == 0) return false;
    if (users_ == 0) {
      library_ = dlopen(path, RTLD_NOW | RTLD_LOCAL);
      if (library_ == nullptr) throw std::runtime_error(std::string("dlopen: ") + dlerror());
      symbol_ = nullptr;
      for (version_ = newest_ + 1; symbol_ == nullptr && version_ > 4;) {
        symbol_ = dlsym(library_, (prefix_ + std::to_string(--version_)).c_str());
      }
    }
    if (symbol_ != nullptr) ++users_;
    return symbol_ != nullptr;
  }

  void close() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (--users_ == 0) dlclose(library_);
  }

 protected:
  Plugin(const char* variable, const char* prefix, int newest)
      : variable_(variable), prefix_(prefix), newest_(newest) {}
  template <typename Struct>
  const Struct* as() const {
    return static_cast<const Struct*>(symbol_);
  }

  int version_ = 0;

 private:
  const char* const variable_;
  const std::string prefix_;
  const int newest_;
  std::mutex mutex_;
  void* library_ = nullptr;
  void* symbol_ = nullptr;
  int users_ = 0;
};

class Tuner : public Plugin {
 public:
  explicit Tuner(int release)
      : Plugin("NCCL_TUNER_PLUGIN", "ncclTunerPlugin_v",
               4 + (release >= 22800) + (release >= 23000)) {}

  ncclResult_t init(void** context, std::uint64_t id, int num_ranks, int num_nodes) const {
    const auto ranks = static_cast<std::size_t>(num_ranks);
    const auto nodes = static_cast<std::size_t>(num_nodes);
    if (version_ == 4) return as<ncclTuner_v4_t>()->init(ranks, nodes, nccl_log, context);
    ncclNvlDomainInfo_v5_t domains = {num_nodes, num_ranks / num_nodes, num_ranks / num_nodes};
    // Without constants: a tuner of ours does not touch them.
    return as<ncclTuner_v5_t>()->init(context, id, ranks, nodes, nccl_log, &domains, nullptr);
  }

  /// v4's getCollInfo and finalize are at one place in all versions.
  const ncclTuner_v4_t* operator->() const { return as<ncclTuner_v4_t>(); }
};

class Profiler : public Plugin {
 public:
  /// Structs before v4 cannot be joined to a rank.
  explicit Profiler(int release)
      : Plugin("NCCL_PROFILER_PLUGIN", "ncclProfiler_v",
               release < 22700 ? 0 : 4 + (release >= 22800) + (release >= 22900)) {}

  ncclResult_t init(void** context, std::uint64_t id, int* mask, int num_nodes, int num_ranks,
                    int rank) const {
    if (version_ == 4) {
      return as<ncclProfiler_v4_t>()->init(context, mask, nullptr, id, num_nodes, num_ranks, rank,
                                           nccl_log);
    }
    return as<ncclProfiler_v5_t>()->init(context, id, mask, nullptr, num_nodes, num_ranks, rank,
                                         nccl_log);
  }

  /// Filled as `src/plugin/profiler.cc` does, unused fields zero. `fill` gets the descriptor of the
  /// version: v4's type differs from that of v5 and v6, and lacks some events.
  template <typename Fill>
  void* start(void* context, std::uint64_t type, void* parent, int rank, const Fill& fill) const {
    void* handle = nullptr;
    const auto run = [&](auto* profiler, auto descriptor) {
      descriptor.type = static_cast<decltype(descriptor.type)>(type);
      descriptor.parentObj = parent;
      descriptor.rank = rank;
      fill(&descriptor);
      profiler->startEvent(context, &handle, &descriptor);
    };
    if (version_ > 4) {
      run(as<ncclProfiler_v5_t>(), ncclProfilerEventDescr_v5_t{});
    } else if constexpr (std::is_invocable_v<Fill, ncclProfilerEventDescr_v4_t*>) {
      run(as<ncclProfiler_v4_t>(), ncclProfilerEventDescr_v4_t{});
    }
    return handle;
  }
  void* start(void* context, std::uint64_t type, void* parent = nullptr, int rank = 0) const {
    return start(context, type, parent, rank, [](auto*) {});
  }

  // At one place in all versions.
  void record(void* handle, int state, ncclProfilerEventStateArgs_v4_t* arguments) const {
    if (handle != nullptr) as<ncclProfiler_v4_t>()->recordEventState(handle, state, arguments);
  }
  void stop(void* handle) const {
    if (handle != nullptr) as<ncclProfiler_v4_t>()->stopEvent(handle);
  }
  void finalize(void* context) const { as<ncclProfiler_v4_t>()->finalize(context); }
};
