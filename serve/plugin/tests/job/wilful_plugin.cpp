// A plugin that does what it is told, right or wrong, and tells what it was called with: by it the
// harness shows that it sees what it is there to see.
//
//   WILFUL_ACT_FROM=N        from call N on, force Ring/LL with WILFUL_CHANNELS (4) channels
//   WILFUL_SWITCH_EVERY=N    and change between Ring/LL and Ring/Simple every N calls
//   WILFUL_CELL=CELL         force that cell instead, available or not
//   WILFUL_CHUNK=BYTES       set every chunk size to it
//   WILFUL_ERROR_AT=N        call N returns an error; WILFUL_INIT_ERROR=1: the tuner's init does
//   WILFUL_WAIT_AT=N         call N returns when the context is being finalized, and then fails
//   WILFUL_LOG_FROM_THREAD=1 log from a thread of its own
//   WILFUL_MASK=BITS         event mask of the profiler
#include <atomic>
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <thread>

#include "nccl/profiler_abi.h"
#include "nccl/tuner_abi.h"
#include "vocabulary.h"

#define EXPORT __attribute__((visibility("default")))

extern "C" {
extern EXPORT const ncclTuner_v2_t ncclTunerPlugin_v2;
extern EXPORT const ncclTuner_v3_t ncclTunerPlugin_v3;
extern EXPORT const ncclTuner_v4_t ncclTunerPlugin_v4;
extern EXPORT const ncclTuner_v5_t ncclTunerPlugin_v5;
extern EXPORT const ncclTuner_v6_t ncclTunerPlugin_v6;
extern EXPORT const ncclProfiler_v4_t ncclProfiler_v4;
extern EXPORT const ncclProfiler_v5_t ncclProfiler_v5;
extern EXPORT const ncclProfiler_v6_t ncclProfiler_v6;
}

namespace {

using namespace dynamiccl;

constexpr long kNever = -1;

long setting(const char* name, long otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr ? std::atol(text) : otherwise;
}

struct Tuner {
  ncclDebugLogger_t logger = nullptr;
  long act_from = setting("WILFUL_ACT_FROM", kNever);
  long switch_every = setting("WILFUL_SWITCH_EVERY", kNever);
  long num_channels = setting("WILFUL_CHANNELS", 4);
  long cell = setting("WILFUL_CELL", kNever);
  long chunk_bytes = setting("WILFUL_CHUNK", kNever);
  long error_at = setting("WILFUL_ERROR_AT", kNever);
  long wait_at = setting("WILFUL_WAIT_AT", kNever);
  std::atomic<long> calls{0};
  std::atomic<bool> closing{false};
  std::atomic<int> inside{0};
};

struct Profiler {
  ncclDebugLogger_t logger = nullptr;
  std::mutex mutex;
  std::map<std::uint64_t, int> events;  // by type
  int stopped = 0, kernels_stopped = 0;
  std::map<std::thread::id, int> threads;
};

/// What startEvent returns.
struct Event {
  Profiler* profiler;
};

__attribute__((format(printf, 2, 3))) void say(ncclDebugLogger_t logger, const char* format, ...) {
  char line[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);
  logger(NCCL_LOG_INFO, NCCL_TUNING, __FILE__, __LINE__, "%s", line);
}

template <int version>
ncclResult_t init(std::size_t ranks, std::size_t nodes, ncclDebugLogger_t logger, void** context) {
  if (setting("WILFUL_INIT_ERROR", 0) != 0) return ncclInvalidUsage;
  auto* tuner = new Tuner;
  tuner->logger = logger;
  *context = tuner;
  say(logger, "tuner v%d init: %zu ranks, %zu nodes", version, ranks, nodes);
  if (setting("WILFUL_LOG_FROM_THREAD", 0) != 0) {
    std::thread([logger] { say(logger, "from a thread"); }).join();
  }
  return ncclSuccess;
}

template <int version>
ncclResult_t init_with_id(void** context, std::uint64_t id, std::size_t ranks, std::size_t nodes,
                          ncclDebugLogger_t logger, ncclNvlDomainInfo_v5_t* domains,
                          ncclTunerConstants_v5_t*) {
  const ncclResult_t result = init<version>(ranks, nodes, logger, context);
  if (result == ncclSuccess) {
    say(logger, "tuner id %016llx, %d domains", static_cast<unsigned long long>(id),
        domains->nNvlDomains);
  }
  return result;
}

/// The cell to force at this call, or -1; `*result` is what the call returns.
long decide(Tuner* tuner, ncclResult_t* result) {
  const long call = tuner->calls++;
  *result = call == tuner->error_at ? ncclInvalidUsage : ncclSuccess;
  if (call == tuner->wait_at) {
    ++tuner->inside;
    while (!tuner->closing) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    --tuner->inside;
    *result = ncclInvalidUsage;
    return -1;
  }
  if (tuner->act_from < 0 || call < tuner->act_from) return -1;
  if (tuner->cell >= 0) return tuner->cell;
  const bool second = tuner->switch_every > 0 && call / tuner->switch_every % 2 == 1;
  return kRing * kNumProtocols + (second ? kSimple : kLL);
}

ncclResult_t ask_v2(void* context, ncclFunc_t, std::size_t, int, int, int, int* algorithm,
                    int* protocol, int* channels) {
  auto* tuner = static_cast<Tuner*>(context);
  ncclResult_t result = ncclSuccess;
  const long cell = decide(tuner, &result);
  if (cell >= 0) {
    *algorithm = static_cast<int>(cell / kNumProtocols);
    *protocol = static_cast<int>(cell % kNumProtocols);
    *channels = static_cast<int>(tuner->num_channels);
  }
  return result;
}

ncclResult_t ask_v3(void* context, ncclFunc_t, std::size_t, int, float** costs, int, int,
                    int* channels) {
  auto* tuner = static_cast<Tuner*>(context);
  ncclResult_t result = ncclSuccess;
  const long cell = decide(tuner, &result);
  if (cell >= 0) {
    reinterpret_cast<float*>(costs)[cell] = 0.0F;
    *channels = static_cast<int>(tuner->num_channels);
  }
  return result;
}

ncclResult_t ask_v4(void* context, ncclFunc_t collective, std::size_t bytes, int ops, float** costs,
                    int algorithms, int protocols, int, int* channels) {
  return ask_v3(context, collective, bytes, ops, costs, algorithms, protocols, channels);
}

ncclResult_t chunk(void* context, ncclFunc_t, std::size_t, int, int, int, std::size_t* bytes) {
  const long wanted = static_cast<Tuner*>(context)->chunk_bytes;
  if (wanted >= 0) *bytes = static_cast<std::size_t>(wanted);
  return ncclSuccess;
}

ncclResult_t finalize_tuner(void* context) {
  auto* tuner = static_cast<Tuner*>(context);
  tuner->closing = true;
  while (tuner->inside > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  say(tuner->logger, "tuner finalize: %ld calls", tuner->calls.load());
  delete tuner;
  return ncclSuccess;
}

ncclResult_t begin(int version, void** context, std::uint64_t id, int* mask, int nodes, int ranks,
                   int rank, ncclDebugLogger_t logger) {
  auto* profiler = new Profiler;
  profiler->logger = logger;
  *context = profiler;
  __atomic_store_n(mask, static_cast<int>(setting("WILFUL_MASK", 0)), __ATOMIC_RELAXED);
  say(logger, "profiler v%d init: rank %d of %d, %d nodes", version, rank, ranks, nodes);
  say(logger, "profiler id %016llx", static_cast<unsigned long long>(id));
  return ncclSuccess;
}

ncclResult_t init_profiler_v4(void** context, int* mask, const char*, std::uint64_t id, int nodes,
                              int ranks, int rank, ncclDebugLogger_t logger) {
  return begin(4, context, id, mask, nodes, ranks, rank, logger);
}

template <int version>
ncclResult_t init_profiler_v5(void** context, std::uint64_t id, int* mask, const char*, int nodes,
                              int ranks, int rank, ncclDebugLogger_t logger) {
  return begin(version, context, id, mask, nodes, ranks, rank, logger);
}

template <typename Descriptor>
ncclResult_t start(void* context, void** handle, Descriptor* descriptor) {
  auto* profiler = static_cast<Profiler*>(context);
  const std::lock_guard<std::mutex> lock(profiler->mutex);
  ++profiler->events[descriptor->type];
  ++profiler->threads[std::this_thread::get_id()];
  *handle = new Event{profiler};
  return ncclSuccess;
}

ncclResult_t stop(void* handle) {
  // Kept: NCCL still passes a handle as a parent after its event was stopped.
  auto* event = static_cast<Event*>(handle);
  const std::lock_guard<std::mutex> lock(event->profiler->mutex);
  ++event->profiler->stopped;
  return ncclSuccess;
}

ncclResult_t record(void* handle, ncclProfilerEventState_t state,
                    ncclProfilerEventStateArgs_v4_t*) {
  auto* event = static_cast<Event*>(handle);
  const std::lock_guard<std::mutex> lock(event->profiler->mutex);
  if (state == ncclProfilerKernelChStop) ++event->profiler->kernels_stopped;
  return ncclSuccess;
}

ncclResult_t finalize_profiler(void* context) {
  auto* profiler = static_cast<Profiler*>(context);
  say(profiler->logger,
      "profiler finalize: group %d coll %d kernel %d group_api %d coll_api %d "
      "kernels_stopped %d threads %zu",
      profiler->events[ncclProfileGroup], profiler->events[ncclProfileColl],
      profiler->events[ncclProfileKernelCh], profiler->events[ncclProfileGroupApi],
      profiler->events[ncclProfileCollApi], profiler->kernels_stopped, profiler->threads.size());
  delete profiler;
  return ncclSuccess;
}

constexpr char kName[] = "Wilful";

}  // namespace

const ncclTuner_v2_t ncclTunerPlugin_v2 = {kName, init<2>, ask_v2, finalize_tuner};
const ncclTuner_v3_t ncclTunerPlugin_v3 = {kName, init<3>, ask_v3, finalize_tuner};
const ncclTuner_v4_t ncclTunerPlugin_v4 = {kName, init<4>, ask_v4, finalize_tuner};
const ncclTuner_v5_t ncclTunerPlugin_v5 = {kName, init_with_id<5>, ask_v4, finalize_tuner};
const ncclTuner_v6_t ncclTunerPlugin_v6 = {kName, init_with_id<6>, ask_v4, finalize_tuner, chunk};
const ncclProfiler_v4_t ncclProfiler_v4 = {
    kName, init_profiler_v4, start<ncclProfilerEventDescr_v4_t>, stop, record, finalize_profiler};
const ncclProfiler_v5_t ncclProfiler_v5 = {
    kName,  init_profiler_v5<5>, start<ncclProfilerEventDescr_v5_t>, stop,
    record, finalize_profiler};
const ncclProfiler_v6_t ncclProfiler_v6 = {
    kName,  init_profiler_v5<6>, start<ncclProfilerEventDescr_v6_t>, stop,
    record, finalize_profiler};
