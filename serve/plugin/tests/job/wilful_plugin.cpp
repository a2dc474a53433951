// A tuner that does what it is told, right or wrong, by which the harness shows that it sees what
// it is there to see. NCCL 2.30 takes its v6, every other release its v4.
//
//   WILFUL_ACT_FROM=N        from call N on, force Ring/LL with WILFUL_CHANNELS (4) channels
//   WILFUL_SWITCH_EVERY=N    and change between Ring/LL and Ring/Simple every N calls
//   WILFUL_CELL=CELL         force that cell instead, available or not
//   WILFUL_ERROR_AT=N        call N returns an error; WILFUL_INIT_ERROR=1: the tuner's init does
//   WILFUL_WAIT_AT=N         call N returns when the context is being finalized, and then fails
//   WILFUL_LOG_FROM_THREAD=1 log from a thread of its own
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <thread>

#include "nccl/tuner_abi.h"
#include "vocabulary.h"

namespace {

using namespace dynamiccl;

long setting(const char* name, long otherwise = -1) {
  const char* text = std::getenv(name);
  return text != nullptr ? std::atol(text) : otherwise;
}

struct Tuner {
  ncclDebugLogger_t logger;
  std::atomic<long> calls{0};
  std::atomic<bool> closing{false};
  std::atomic<int> inside{0};
};

template <typename... Values>
void say(ncclDebugLogger_t logger, const char* format, Values... values) {
  logger(NCCL_LOG_INFO, NCCL_TUNING, __FILE__, __LINE__, format, values...);
}

ncclResult_t init(std::size_t, std::size_t, ncclDebugLogger_t logger, void** context) {
  if (setting("WILFUL_INIT_ERROR") > 0) return ncclInvalidUsage;
  *context = new Tuner{logger};
  if (setting("WILFUL_LOG_FROM_THREAD") > 0) {
    std::thread([logger] { say(logger, "from a thread"); }).join();
  }
  return ncclSuccess;
}

ncclResult_t init_with_id(void** context, std::uint64_t id, std::size_t ranks, std::size_t nodes,
                          ncclDebugLogger_t logger, ncclNvlDomainInfo_v5_t*,
                          ncclTunerConstants_v5_t*) {
  say(logger, "tuner id %016llx", static_cast<unsigned long long>(id));
  return init(ranks, nodes, logger, context);
}

ncclResult_t ask(void* context, ncclFunc_t, std::size_t, int, float** costs, int, int, int,
                 int* channels) {
  auto* tuner = static_cast<Tuner*>(context);
  const long call = tuner->calls++;
  if (call == setting("WILFUL_WAIT_AT")) {
    ++tuner->inside;
    while (!tuner->closing) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    --tuner->inside;
    return ncclInvalidUsage;
  }
  const long act_from = setting("WILFUL_ACT_FROM");
  const long switch_every = setting("WILFUL_SWITCH_EVERY");
  if (act_from >= 0 && call >= act_from) {
    const bool is_second = switch_every > 0 && call / switch_every % 2 == 1;
    const long own = kRing * kNumProtocols + (is_second ? kSimple : kLL);
    reinterpret_cast<float*>(costs)[setting("WILFUL_CELL", own)] = 0.0F;
    *channels = static_cast<int>(setting("WILFUL_CHANNELS", 4));
  }
  return call == setting("WILFUL_ERROR_AT") ? ncclInvalidUsage : ncclSuccess;
}

ncclResult_t finalize(void* context) {
  auto* tuner = static_cast<Tuner*>(context);
  tuner->closing = true;
  while (tuner->inside > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  say(tuner->logger, "tuner finalize");
  delete tuner;
  return ncclSuccess;
}

}  // namespace

const ncclTuner_v4_t ncclTunerPlugin_v4 = {"Wilful", init, ask, finalize};
const ncclTuner_v6_t ncclTunerPlugin_v6 = {"Wilful", init_with_id, ask, finalize, nullptr};
