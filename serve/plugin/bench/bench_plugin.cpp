// Time of one getCollInfo in the library of mode adaptive, which can switch tables.
//
//   bench_plugin ADAPTIVE      prints JSON
//
// The environment of ADAPTIVE must be set, with a table of two ranks and an arbiter.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "bench/calls.h"
#include "nccl/profiler_abi.h"

namespace {

/// Two ranks of one communicator as threads of this process: `init` votes.
struct TwoRanks {
  explicit TwoRanks(void* library)
      : tuner(static_cast<const ncclTuner_v5_t*>(dlsym(library, "ncclTunerPlugin_v5"))),
        profiler(static_cast<const ncclProfiler_v5_t*>(dlsym(library, "ncclProfiler_v5"))) {
    std::thread other(&TwoRanks::init, this, 1);
    init(0);
    other.join();
  }
  ~TwoRanks() {
    for (int rank = 0; rank < 2; ++rank) {
      tuner->finalize(tuners[rank]);
      profiler->finalize(profilers[rank]);
    }
  }
  TwoRanks(const TwoRanks&) = delete;
  TwoRanks& operator=(const TwoRanks&) = delete;

  void init(int rank) {
    profiler->init(&profilers[rank], 7, &mask, "bench", 1, 2, rank, nullptr);
    tuner->init(&tuners[rank], 7, 2, 1, nullptr, nullptr, nullptr);
    if (tuners[rank] == nullptr) std::exit(4);
  }

  const ncclTuner_v5_t* tuner;
  const ncclProfiler_v5_t* profiler;
  void *tuners[2] = {}, *profilers[2] = {};
  int mask = 0;
};

}  // namespace

int main(int count, char** arguments) {
  if (count != 2) return 2;
  void* library = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return 3;
  const TwoRanks ranks(library);
  const std::vector<double> full = measure(*ranks.tuner, ranks.tuners[0]);
  std::printf("{\"adaptive_getcollinfo_p50_ns\": %.2f, \"adaptive_getcollinfo_p99_ns\": %.2f}\n",
              quantile(full, 0.5), quantile(full, 0.99));
  return 0;
}
