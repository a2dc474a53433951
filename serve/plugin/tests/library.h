// Calls a built tuner as NCCL does: dlopen, one struct per version, that version's own argument
// order, a flat cost table, `*nChannels` 0 before the call. All ranks of a communicator are threads
// of this process, so they really agree.
#pragma once

#include <dlfcn.h>

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "nccl/profiler_abi.h"
#include "nccl/tuner_abi.h"
#include "vocabulary.h"

/// The NCCL that a tuner finds in this process (ENABLE_EXPORTS).
extern "C" __attribute__((visibility("default"))) int ncclGetVersion(int* version) {
  *version = 23007;
  return 0;
}

/// Logger of the tests: keeps the lines of the calling thread.
inline thread_local std::vector<std::string> t_lines;

/// What the calling thread's latest `init` returned.
inline thread_local ncclResult_t t_init_result = ncclSuccess;

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
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  template <typename Struct>
  const Struct* at(int version) const {
    const std::string symbol = "ncclTunerPlugin_v" + std::to_string(version);
    return static_cast<const Struct*>(dlsym(handle_, symbol.c_str()));
  }

  /// A new communicator; the first rank's context.
  void* init(int version, std::size_t num_ranks, std::size_t num_nodes,
             ncclDebugLogger_t logger = keep_line) const {
    const std::uint64_t id = ++last_id_;
    std::vector<void*> contexts(num_inits_ == 0 ? num_ranks : num_inits_);
    const auto rank = [&](std::size_t number) {
      return init_rank(version, id, num_ranks, num_nodes, logger, &contexts[number]);
    };
    std::vector<std::thread> others;
    for (std::size_t i = 1; i < contexts.size(); ++i) others.emplace_back(rank, i);
    t_init_result = rank(0);
    for (std::thread& other : others) other.join();
    const std::lock_guard lock(mutex_);
    if (contexts[0] != nullptr) contexts_[id] = contexts;
    return contexts[0];
  }

  Call ask(int version, void* context, Call call) const {
    float** table = reinterpret_cast<float**>(call.costs.data());
    const int a = call.num_algorithms, p = call.num_protocols;
    call.result = at<ncclTuner_v4_t>(version)->getCollInfo(  // at one place in all versions
        context, call.collective, call.size_bytes, call.num_pipe_ops, table, a, p, version > 4,
        &call.num_channels);
    return call;
  }

  ncclResult_t finalize(int version, void* context) const {
    std::vector<void*> ranks = {context};
    {
      // One table may be the context of several communicators: any of them will do.
      const std::lock_guard lock(mutex_);
      for (auto found = contexts_.begin(); found != contexts_.end(); ++found) {
        if (found->second[0] != context) continue;
        ranks = found->second;
        contexts_.erase(found);
        break;
      }
    }
    ncclResult_t result = ncclSuccess;
    for (void* rank : ranks) {
      // At one place in all versions.
      const ncclResult_t its_result = at<ncclTuner_v4_t>(version)->destroy(rank);
      if (its_result != ncclSuccess) result = its_result;
    }
    return result;
  }

 private:
  ncclResult_t init_rank(int version, std::uint64_t id, std::size_t ranks, std::size_t nodes,
                         ncclDebugLogger_t logger, void** context) const {
    if (version == 4) {
      // As NCCL 2.27 does just before: a tuner of v4 knows the id from there.
      int mask = 0;
      const auto* told = static_cast<const ncclProfiler_v4_t*>(dlsym(handle_, "ncclProfiler_v4"));
      void* ignored = nullptr;
      if (told != nullptr) {
        told->init(&ignored, &mask, "", id, static_cast<int>(nodes), static_cast<int>(ranks), 0,
                   logger);
      }
      return at<ncclTuner_v4_t>(version)->init(ranks, nodes, logger, context);
    }
    return at<ncclTuner_v5_t>(version)->init(context, id, ranks, nodes, logger, nullptr, nullptr);
  }

  void* handle_;
  const std::size_t num_inits_;
  mutable std::atomic<std::uint64_t> last_id_{100};
  mutable std::mutex mutex_;
  mutable std::map<std::uint64_t, std::vector<void*>> contexts_;  // of the ranks, by id
};
