// Calls a built tuner as NCCL does: dlopen, one struct per version, that version's own argument
// order, a flat cost table, `*nChannels` 0 before the call. All ranks of a communicator are threads
// of this process, so they really agree.
#pragma once

#include <dlfcn.h>

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "nccl/profiler_abi.h"
#include "nccl/tuner_abi.h"
#include "tests/check.h"
#include "vocabulary.h"

/// The NCCL that a tuner finds in this process (ENABLE_EXPORTS).
extern "C" __attribute__((visibility("default"))) int ncclGetVersion(int* version) {
  *version = 23007;
  return 0;
}

/// Logger of the tests: keeps the lines of the calling thread.
inline thread_local std::vector<std::string> t_lines;

inline void keep_line(ncclDebugLogLevel, unsigned long, const char*, int, const char* format, ...) {
  char line[8192];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);
  t_lines.emplace_back(line);
}

/// A cost table as NCCL passes it, and what came back.
struct Call {
  int collective = dynamiccl::kAllReduce;
  std::size_t size_bytes = 1 << 20;
  int num_algorithms = 7;
  int num_protocols = 3;
  std::vector<float> costs = std::vector<float>(21, 10.0F);
  int num_channels = 0;
  int num_pipe_ops = 1;
  ncclResult_t result = ncclSuccess;
};

class Library {
 public:
  /// `num_inits`: how many of a communicator's ranks come; 0: all of them.
  explicit Library(const char* path, std::size_t num_inits = 0)
      : handle_(dlopen(path, RTLD_NOW | RTLD_LOCAL)), num_inits_(num_inits) {
    if (handle_ == nullptr) {
      std::fprintf(stderr, "dlopen: %s\n", dlerror());
      std::exit(1);
    }
  }

  ~Library() { dlclose(handle_); }

  template <typename Struct>
  const Struct* at(int version) const {
    const std::string symbol = "ncclTunerPlugin_v" + std::to_string(version);
    return static_cast<const Struct*>(dlsym(handle_, symbol.c_str()));
  }
  template <typename Struct>
  const Struct* profiler(int version) const {
    const std::string symbol = "ncclProfiler_v" + std::to_string(version);
    return static_cast<const Struct*>(dlsym(handle_, symbol.c_str()));
  }

  /// A new communicator, of the next `id` unless given; the first rank's context.
  void* init(int version, std::size_t num_ranks, std::size_t num_nodes,
             ncclDebugLogger_t logger = keep_line, std::uint64_t id = 0) const {
    if (id == 0) id = ++last_id_;
    std::vector<void*> contexts(num_inits_ == 0 ? num_ranks : num_inits_);
    const auto rank = [&](void** context) {
      // NCCL calls a profiler just before: a tuner of v4 knows the id from there, and that of mode
      // adaptive needs it.
      const int ranks = static_cast<int>(num_ranks), nodes = static_cast<int>(num_nodes);
      static int mask = 0;
      void* ignored = nullptr;
      if (version < 5) {
        profiler<ncclProfiler_v4_t>(4)->init(&ignored, &mask, "", id, nodes, ranks, 0, logger);
        at<ncclTuner_v4_t>(4)->init(num_ranks, num_nodes, logger, context);
        return;
      }
      const auto* profiler_v5 = profiler<ncclProfiler_v5_t>(5);
      if (profiler_v5 != nullptr) {
        profiler_v5->init(&ignored, id, &mask, "", nodes, ranks, 0, logger);
      }
      CHECK(at<ncclTuner_v5_t>(version)->init(context, id, num_ranks, num_nodes, logger, nullptr,
                                              nullptr) == ncclSuccess);
    };
    std::vector<std::thread> others;
    for (std::size_t i = 1; i < contexts.size(); ++i) others.emplace_back(rank, &contexts[i]);
    rank(&contexts[0]);
    for (std::thread& other : others) other.join();
    return contexts[0];
  }

  // `getCollInfo` and `finalize` are at one place in all versions.

  Call ask(int version, void* context, Call call) const {
    call.result = at<ncclTuner_v4_t>(version)->getCollInfo(
        context, call.collective, call.size_bytes, call.num_pipe_ops,
        reinterpret_cast<float**>(call.costs.data()), call.num_algorithms, call.num_protocols,
        version > 4, &call.num_channels);
    return call;
  }

  ncclResult_t finalize(int version, void* context) const {
    return at<ncclTuner_v4_t>(version)->finalize(context);
  }

 private:
  void* handle_;
  const std::size_t num_inits_;
  mutable std::atomic<std::uint64_t> last_id_{100};
};
