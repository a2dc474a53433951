// A tuner that does what it is told, right or wrong: by it the harness of jobs shows that it sees
// what it is there to see, and it is the vendor's tuner behind ours. Of several structs NCCL takes
// the newest that it knows; WILFUL_NEWEST is the newest here.
//
//   WILFUL_CELL=CELL         free that cell, available or not, with WILFUL_CHANNELS (3) channels
//   WILFUL_ACT_FROM=N        from call N on; without WILFUL_CELL Ring/LL is freed
//   WILFUL_CHUNK=BYTES       give that chunk size
//   WILFUL_ERROR_AT=N        call N returns an error; WILFUL_INIT_ERROR=1: the tuner's init does
//   WILFUL_LOG_FROM_THREAD=1 log from a thread of its own
#include <atomic>
#include <cstdlib>
#include <thread>

#include "nccl/tuner_abi.h"
#include "vocabulary.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

/// What all of it was asked; read from outside by its symbol (tests/serve/test_vendor.py).
struct WilfulCounts {
  std::atomic<int> inits{0}, calls{0}, finalized{0}, version{0}, reg_buff{-1};
  std::atomic<std::uint64_t> comm_id{0};
  std::atomic<void*> constants{nullptr};
};
EXPORT WilfulCounts wilful_counts;
WilfulCounts wilful_counts;

namespace {

using namespace dynamiccl;

long setting(const char* name, long otherwise = -1) {
  const char* text = std::getenv(name);
  return text != nullptr ? std::atol(text) : otherwise;
}

struct Tuner {
  const Tuner* self = this;  // so that another one's context is noticed
  std::atomic<long> calls{0};
};

Tuner* tuner_of(void* context) {
  auto* tuner = static_cast<Tuner*>(context);
  if (tuner->self != tuner) std::abort();
  return tuner;
}

template <int version>
ncclResult_t init(std::size_t, std::size_t, ncclDebugLogger_t logger, void** context) {
  wilful_counts.version = version;
  if (setting("WILFUL_INIT_ERROR") > 0) return ncclInvalidUsage;
  ++wilful_counts.inits;
  *context = new Tuner;
  if (setting("WILFUL_LOG_FROM_THREAD") > 0) {
    std::thread(logger, NCCL_LOG_INFO, NCCL_TUNING, __FILE__, __LINE__, "from a thread").join();
  }
  return ncclSuccess;
}

[[maybe_unused]] ncclResult_t init_v6(void** context, std::uint64_t id, std::size_t ranks,
                                      std::size_t nodes, ncclDebugLogger_t logger,
                                      ncclNvlDomainInfo_v5_t*, ncclTunerConstants_v5_t* constants) {
  wilful_counts.comm_id = id;
  wilful_counts.constants = constants;
  return init<6>(ranks, nodes, logger, context);
}

ncclResult_t ask(void* context, ncclFunc_t, std::size_t, int, float** costs, int, int, int reg_buff,
                 int* channels) {
  Tuner* tuner = tuner_of(context);
  const long call = tuner->calls++;
  ++wilful_counts.calls;
  wilful_counts.reg_buff = reg_buff;
  const long act_from = setting("WILFUL_ACT_FROM");
  const long ring_ll = kRing * kNumProtocols + kLL;
  const long cell = setting("WILFUL_CELL", act_from >= 0 ? ring_ll : -1);
  if (cell >= 0 && call >= act_from) {
    reinterpret_cast<float*>(costs)[cell] = 0.0F;
    *channels = static_cast<int>(setting("WILFUL_CHANNELS", 3));
  }
  return call == setting("WILFUL_ERROR_AT") ? ncclInvalidUsage : ncclSuccess;
}

ncclResult_t ask_v3(void* context, ncclFunc_t collective, std::size_t bytes, int ops, float** costs,
                    int algorithms, int protocols, int* channels) {
  return ask(context, collective, bytes, ops, costs, algorithms, protocols, -1, channels);
}

[[maybe_unused]] ncclResult_t chunk(void*, ncclFunc_t, std::size_t, int, int, int,
                                    std::size_t* bytes) {
  const long wanted = setting("WILFUL_CHUNK");
  if (wanted >= 0) *bytes = static_cast<std::size_t>(wanted);
  return ncclSuccess;
}

ncclResult_t finalize(void* context) {
  Tuner* tuner = tuner_of(context);
  ++wilful_counts.finalized;
  delete tuner;
  return ncclSuccess;
}

}  // namespace

EXPORT const ncclTuner_v3_t ncclTunerPlugin_v3 = {"Wilful", init<3>, ask_v3, finalize};
#if WILFUL_NEWEST >= 4
EXPORT const ncclTuner_v4_t ncclTunerPlugin_v4 = {"Wilful", init<4>, ask, finalize};
#endif
#if WILFUL_NEWEST >= 6
EXPORT const ncclTuner_v6_t ncclTunerPlugin_v6 = {{"Wilful", init_v6, ask, finalize}, chunk};
#endif
