// Calls the built plugin as NCCL does: dlopen, one struct per version, that version's own argument
// order, a flat cost table, `*nChannels` 0 before the call.
#pragma once

#include <dlfcn.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "nccl/tuner_abi.h"
#include "vocabulary.h"

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
  // v2 only
  int nvls_support = 1;
  int algorithm = -1;
  int protocol = -1;
  ncclResult_t result = ncclSuccess;
};

class Library {
 public:
  explicit Library(const char* path) : handle_(dlopen(path, RTLD_NOW | RTLD_LOCAL)) {
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

  void* init(int version, std::size_t num_ranks, std::size_t num_nodes,
             ncclNvlDomainInfo_v5_t* domains = nullptr,
             ncclDebugLogger_t logger = keep_line) const {
    void* context = nullptr;
    ncclResult_t& result = t_init_result;
    if (version == 2) result = at<ncclTuner_v2_t>(2)->init(num_ranks, num_nodes, logger, &context);
    if (version == 3) result = at<ncclTuner_v3_t>(3)->init(num_ranks, num_nodes, logger, &context);
    if (version == 4) result = at<ncclTuner_v4_t>(4)->init(num_ranks, num_nodes, logger, &context);
    if (version == 5) {
      result =
          at<ncclTuner_v5_t>(5)->init(&context, 7, num_ranks, num_nodes, logger, domains, nullptr);
    }
    if (version == 6) {
      result =
          at<ncclTuner_v6_t>(6)->init(&context, 7, num_ranks, num_nodes, logger, domains, nullptr);
    }
    return context;
  }

  /// v6's getChunkSize for one part of a collective; `own` is NCCL's chunk in bytes.
  std::size_t chunk(void* context, int collective, int algorithm, int protocol,
                    std::size_t own) const {
    const auto* tuner = at<ncclTuner_v6_t>(6);
    const ncclResult_t result =
        tuner->getChunkSize(context, collective, 1 << 18, algorithm, protocol, 1, &own);
    return result == ncclSuccess ? own : 0;
  }

  Call ask(int version, void* context, Call call) const {
    float** table = reinterpret_cast<float**>(call.costs.data());
    const int a = call.num_algorithms, p = call.num_protocols;
    if (version == 2) {
      call.result = at<ncclTuner_v2_t>(2)->getCollInfo(context, call.collective, call.size_bytes, 0,
                                                       call.nvls_support, 1, &call.algorithm,
                                                       &call.protocol, &call.num_channels);
    } else if (version == 3) {
      call.result = at<ncclTuner_v3_t>(3)->getCollInfo(context, call.collective, call.size_bytes, 1,
                                                       table, a, p, &call.num_channels);
    } else if (version == 4) {
      call.result = at<ncclTuner_v4_t>(4)->getCollInfo(context, call.collective, call.size_bytes, 1,
                                                       table, a, p, 0, &call.num_channels);
    } else if (version == 5) {
      call.result = at<ncclTuner_v5_t>(5)->getCollInfo(context, call.collective, call.size_bytes, 1,
                                                       table, a, p, 1, &call.num_channels);
    } else {
      call.result = at<ncclTuner_v6_t>(6)->getCollInfo(context, call.collective, call.size_bytes, 1,
                                                       table, a, p, 1, &call.num_channels);
    }
    return call;
  }

  ncclResult_t finalize(int version, void* context) const {
    if (version == 2) return at<ncclTuner_v2_t>(2)->destroy(context);
    if (version == 3) return at<ncclTuner_v3_t>(3)->destroy(context);
    if (version == 4) return at<ncclTuner_v4_t>(4)->destroy(context);
    if (version == 5) return at<ncclTuner_v5_t>(5)->finalize(context);
    return at<ncclTuner_v6_t>(6)->finalize(context);
  }

 private:
  void* handle_;
};
