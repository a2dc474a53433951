// A vendor's tuner: does what VENDOR_* say at each call, and counts what was asked of it.
//
//   VENDOR_CELL=CELL   free that cell and ask for 3 channels; VENDOR_CHUNK=BYTES: that chunk
//   VENDOR_ERROR=1     getCollInfo fails; VENDOR_INIT_ERROR=1: init fails
#include <atomic>
#include <cstdlib>

#include "nccl/tuner_abi.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

/// What it was asked; read from outside by its symbol (tests/serve/test_vendor.py).
struct VendorCounts {
  std::atomic<int> inits{0};
  std::atomic<int> calls{0};
  std::atomic<int> finalized{0};
  std::atomic<int> version{0};
  std::atomic<int> reg_buff{-1};
  std::atomic<std::uint64_t> comm_id{0};
  std::atomic<void*> constants{nullptr};
};
EXPORT VendorCounts vendor_counts;
VendorCounts vendor_counts;

namespace {

int setting(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr ? std::atoi(text) : otherwise;
}

char g_context;

template <int version>
[[maybe_unused]] ncclResult_t init(std::size_t, std::size_t, ncclDebugLogger_t, void** context) {
  vendor_counts.version = version;
  if (setting("VENDOR_INIT_ERROR", 0) != 0) return ncclSystemError;
  ++vendor_counts.inits;
  *context = &g_context;
  return ncclSuccess;
}

[[maybe_unused]] ncclResult_t init_v6(void** context, std::uint64_t id, std::size_t ranks,
                                      std::size_t nodes, ncclDebugLogger_t logger,
                                      ncclNvlDomainInfo_v5_t*, ncclTunerConstants_v5_t* constants) {
  vendor_counts.comm_id = id;
  vendor_counts.constants = constants;
  return init<6>(ranks, nodes, logger, context);
}

ncclResult_t ask(void* context, ncclFunc_t, std::size_t, int, float** costs, int, int, int reg_buff,
                 int* channels) {
  ++vendor_counts.calls;
  vendor_counts.reg_buff = reg_buff;
  if (context != &g_context) std::abort();
  const int cell = setting("VENDOR_CELL", -1);
  if (cell >= 0) {
    reinterpret_cast<float*>(costs)[cell] = 0.0F;
    *channels = 3;
  }
  return setting("VENDOR_ERROR", 0) != 0 ? ncclInvalidUsage : ncclSuccess;
}

ncclResult_t ask_v3(void* context, ncclFunc_t collective, std::size_t bytes, int ops, float** costs,
                    int algorithms, int protocols, int* channels) {
  return ask(context, collective, bytes, ops, costs, algorithms, protocols, -1, channels);
}

[[maybe_unused]] ncclResult_t chunk(void*, ncclFunc_t, std::size_t, int, int, int,
                                    std::size_t* bytes) {
  const int wanted = setting("VENDOR_CHUNK", -1);
  if (wanted >= 0) *bytes = static_cast<std::size_t>(wanted);
  return ncclSuccess;
}

ncclResult_t finish(void* context) {
  if (context != &g_context) std::abort();
  ++vendor_counts.finalized;
  return ncclSuccess;
}

}  // namespace

EXPORT const ncclTuner_v3_t ncclTunerPlugin_v3;
const ncclTuner_v3_t ncclTunerPlugin_v3 = {"Vendor", init<3>, ask_v3, finish};
#if VENDOR_NEWEST >= 4
EXPORT const ncclTuner_v4_t ncclTunerPlugin_v4;
const ncclTuner_v4_t ncclTunerPlugin_v4 = {"Vendor", init<4>, ask, finish};
#endif
#if VENDOR_NEWEST >= 6
EXPORT const ncclTuner_v6_t ncclTunerPlugin_v6;
const ncclTuner_v6_t ncclTunerPlugin_v6 = {"Vendor", init_v6, ask, finish, chunk};
#endif
