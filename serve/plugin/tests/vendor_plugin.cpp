// A vendor's tuner: does what VENDOR_* say at each call, and counts what was asked of it.
//
//   VENDOR_CELL=CELL   free that cell and ask for 3 channels; VENDOR_CHUNK=BYTES: that chunk
//   VENDOR_ERROR=1     getCollInfo fails; VENDOR_INIT_ERROR=1: init fails
#include <atomic>
#include <cstdlib>

#include "nccl/tuner_abi.h"

/// What it was asked; read from outside by its symbol (tests/serve/test_vendor.py).
struct VendorCounts {
  std::atomic<int> inits{0};
  std::atomic<int> calls{0};
  std::atomic<int> finalized{0};
  std::atomic<int> version{0};
  std::atomic<int> support{-1};  // v2: 2 x CollNet + NVLS
  std::atomic<int> reg_buff{-1};
  std::atomic<std::uint64_t> comm_id{0};
  std::atomic<void*> constants{nullptr};
};

#define EXPORT extern "C" __attribute__((visibility("default")))

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

template <int version>
[[maybe_unused]] ncclResult_t init_with_id(void** context, std::uint64_t id, std::size_t ranks,
                                           std::size_t nodes, ncclDebugLogger_t logger,
                                           ncclNvlDomainInfo_v5_t*,
                                           ncclTunerConstants_v5_t* constants) {
  vendor_counts.comm_id = id;
  vendor_counts.constants = constants;
  return init<version>(ranks, nodes, logger, context);
}

[[maybe_unused]] ncclResult_t ask_v2(void* context, ncclFunc_t, std::size_t, int collnet, int nvls,
                                     int, int* algorithm, int* protocol, int* channels) {
  ++vendor_counts.calls;
  vendor_counts.support = 2 * collnet + nvls;
  if (context != &g_context) std::abort();
  const int cell = setting("VENDOR_CELL", -1);
  if (cell >= 0) {
    *algorithm = cell / 3;
    *protocol = cell % 3;
    *channels = 3;
  }
  return setting("VENDOR_ERROR", 0) != 0 ? ncclInvalidUsage : ncclSuccess;
}

[[maybe_unused]] ncclResult_t ask_v3(void* context, ncclFunc_t, std::size_t, int, float** costs,
                                     int, int, int* channels) {
  ++vendor_counts.calls;
  if (context != &g_context) std::abort();
  const int cell = setting("VENDOR_CELL", -1);
  if (cell >= 0) {
    reinterpret_cast<float*>(costs)[cell] = 0.0F;
    *channels = 3;
  }
  return setting("VENDOR_ERROR", 0) != 0 ? ncclInvalidUsage : ncclSuccess;
}

[[maybe_unused]] ncclResult_t ask_v4(void* context, ncclFunc_t collective, std::size_t bytes,
                                     int ops, float** costs, int algorithms, int protocols,
                                     int reg_buff, int* channels) {
  vendor_counts.reg_buff = reg_buff;
  return ask_v3(context, collective, bytes, ops, costs, algorithms, protocols, channels);
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

#if VENDOR_EXPORTS & (1 << 2)
EXPORT const ncclTuner_v2_t ncclTunerPlugin_v2;
const ncclTuner_v2_t ncclTunerPlugin_v2 = {"Vendor", init<2>, ask_v2, finish};
#endif
#if VENDOR_EXPORTS & (1 << 3)
EXPORT const ncclTuner_v3_t ncclTunerPlugin_v3;
const ncclTuner_v3_t ncclTunerPlugin_v3 = {"Vendor", init<3>, ask_v3, finish};
#endif
#if VENDOR_EXPORTS & (1 << 5)
EXPORT const ncclTuner_v5_t ncclTunerPlugin_v5;
const ncclTuner_v5_t ncclTunerPlugin_v5 = {"Vendor", init_with_id<5>, ask_v4, finish};
#endif
#if VENDOR_EXPORTS & (1 << 6)
EXPORT const ncclTuner_v6_t ncclTunerPlugin_v6;
const ncclTuner_v6_t ncclTunerPlugin_v6 = {"Vendor", init_with_id<6>, ask_v4, finish, chunk};
#endif
