// A vendor's profiler: writes down every call, with numbers in place of pointers, so that two runs
// can be compared.
//
//   VENDOR_LOG=FILE     where to; without it calls are counted alone
//   VENDOR_MASK=BITS    the event mask that each init sets
//   VENDOR_NULL=BITS    event types that get no handle
//   VENDOR_MASK_AT=N:BITS,N:BITS...  another mask from within the N-th startEvent
//   VENDOR_INIT_ERROR=1 init fails; VENDOR_NO_CONTEXT=1: it succeeds without a context
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <type_traits>
#include <unordered_map>

#include "nccl/profiler_abi.h"
#include "tests/vendor_events.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT VendorEvents vendor_events;
VendorEvents vendor_events;

namespace {

struct Object {
  std::uint64_t type;  // 0: a context
  long number;
  int live;  // event not stopped, or context not finalized
};

std::mutex g_mutex;
long g_objects = 0;
FILE* g_log = nullptr;

int setting(const char* name) {
  const char* text = std::getenv(name);
  return text != nullptr ? std::atoi(text) : 0;
}

__attribute__((format(printf, 1, 2))) void write_line(const char* format, ...) {
  const char* path = std::getenv("VENDOR_LOG");
  if (path == nullptr) return;
  if (g_log == nullptr) g_log = std::fopen(path, "w");
  va_list arguments;
  va_start(arguments, format);
  std::vfprintf(g_log, format, arguments);
  va_end(arguments);
  std::fflush(g_log);
}

/// Objects are never freed, so that a wrong use is seen as one.
Object* make(std::uint64_t type) { return new Object{type, ++g_objects, 1}; }

/// What a pointer is that we gave out; anything else would not be one of ours, and crash here.
long number_of(const void* pointer) {
  return pointer != nullptr ? static_cast<const Object*>(pointer)->number : 0;
}

template <typename Descr>
void describe(const Descr& event, char* text, std::size_t size) {
  constexpr bool is_v4 = std::is_same_v<Descr, ncclProfilerEventDescr_v4_t>;
  text[0] = '\0';
  switch (event.type) {
    case ncclProfileColl: {
      long group = -1;
      if constexpr (!is_v4) group = number_of(event.collOfGroup.parentGroup);
      std::snprintf(text, size, "seq %lu %s count %zu %s ch %d %s group %ld",
                    static_cast<unsigned long>(event.coll.seqNumber), event.coll.func,
                    event.coll.count, event.coll.datatype, event.coll.nChannels, event.coll.algo,
                    group);
      return;
    }
    case ncclProfileP2p: {
      long group = -1;
      if constexpr (!is_v4) group = number_of(event.p2pOfGroup.parentGroup);
      std::snprintf(text, size, "%s count %zu peer %d ch %d group %ld", event.p2p.func,
                    event.p2p.count, event.p2p.peer, event.p2p.nChannels, group);
      return;
    }
    case ncclProfileKernelCh:
      std::snprintf(text, size, "ch %d at %lu", event.kernelCh.channelId,
                    static_cast<unsigned long>(event.kernelCh.pTimer));
      return;
    case ncclProfileProxyOp:
      std::snprintf(text, size, "own %d ch %d peer %d send %d", event.proxyOp.pid == getpid(),
                    event.proxyOp.channelId, event.proxyOp.peer, event.proxyOp.isSend);
      return;
    case ncclProfileNetPlugin:
      std::snprintf(text, size, "id %ld", static_cast<long>(event.netPlugin.id));
      return;
    default:
      if constexpr (!is_v4) {
        if (event.type == ncclProfileCeColl) {
          std::snprintf(text, size, "%s strategy %s", event.ceColl.func, event.ceColl.syncStrategy);
        }
        if (event.type == ncclProfileCollApi) {
          std::snprintf(text, size, "%s captured %d", event.collApi.func,
                        event.collApi.graphCaptured);
        }
      }
  }
}

int* g_mask = nullptr;

/// Also by the test, from outside.
void set_mask(int mask) { __atomic_store_n(g_mask, mask, __ATOMIC_SEQ_CST); }

void change_mask(long starts) {
  const char* at = std::getenv("VENDOR_MASK_AT");
  while (at != nullptr && *at != '\0') {
    char* end = nullptr;
    const long when = std::strtol(at, &end, 10);
    const long mask = std::strtol(end + 1, &end, 10);
    if (when == starts) {
      write_line("mask %ld\n", mask);
      set_mask(static_cast<int>(mask));
    }
    at = *end == ',' ? end + 1 : end;
  }
}

ncclResult_t begin(int version, void** context, int* mask, const char* name, std::uint64_t id,
                   int nodes, int ranks, int rank) {
  const std::lock_guard<std::mutex> lock(g_mutex);
  vendor_events.version = version;
  vendor_events.mask = mask;
  ++vendor_events.inits;
  if (setting("VENDOR_INIT_ERROR") != 0) return ncclSystemError;
  g_mask = mask;
  set_mask(setting("VENDOR_MASK"));
  if (setting("VENDOR_NO_CONTEXT") == 0) *context = make(0);
  write_line("init %ld %s id %lu nodes %d ranks %d rank %d\n", number_of(*context), name,
             static_cast<unsigned long>(id), nodes, ranks, rank);
  return ncclSuccess;
}

[[maybe_unused]] ncclResult_t init_v4(void** context, int* mask, const char* name, std::uint64_t id,
                                      int nodes, int ranks, int rank, ncclDebugLogger_t) {
  return begin(4, context, mask, name, id, nodes, ranks, rank);
}

template <int version>
[[maybe_unused]] ncclResult_t init(void** context, std::uint64_t id, int* mask, const char* name,
                                   int nodes, int ranks, int rank, ncclDebugLogger_t) {
  return begin(version, context, mask, name, id, nodes, ranks, rank);
}

template <typename Descr>
ncclResult_t start(void* context, void** handle, Descr* event) {
  const std::lock_guard<std::mutex> lock(g_mutex);
  const long starts = ++vendor_events.starts;
  const auto bit = static_cast<int>(event->type);
  ++vendor_events.of_type[__builtin_ctz(static_cast<unsigned>(bit))];
  const bool is_foreign = event->type == ncclProfileProxyOp && event->proxyOp.pid != getpid();
  // The proxy's events may come with the context of another process.
  constexpr int kOfProxy = ncclProfileProxyOp | ncclProfileProxyStep | ncclProfileNetPlugin;
  auto* owner = static_cast<Object*>((bit & kOfProxy) != 0 ? nullptr : context);
  if (owner != nullptr && owner->live == 0) ++vendor_events.late;
  auto* made = (setting("VENDOR_NULL") & bit) == 0 ? make(event->type) : nullptr;
  char text[256];
  describe(*event, text, sizeof text);
  write_line("start %d in %ld under %ld rank %d: %s -> %ld\n", bit, number_of(owner),
             is_foreign ? -1 : number_of(event->parentObj), event->rank, text, number_of(made));
  event->parentObj = nullptr;  // as a plugin may
  *handle = made;
  vendor_events.open += made != nullptr;
  change_mask(starts);
  // Nobody looks at what it returns.
  return starts % 2 == 0 ? ncclSuccess : ncclSystemError;
}

[[maybe_unused]] ncclResult_t stop(void* handle) {
  const std::lock_guard<std::mutex> lock(g_mutex);
  auto* event = static_cast<Object*>(handle);
  write_line("stop %ld\n", number_of(event));
  vendor_events.open -= event->live;
  vendor_events.twice += event->live == 0;
  event->live = 0;
  return ncclSuccess;
}

[[maybe_unused]] ncclResult_t record(void* handle, ncclProfilerEventState_t state,
                                     ncclProfilerEventStateArgs_v4_t* arguments) {
  const std::lock_guard<std::mutex> lock(g_mutex);
  const bool has_time = state == ncclProfilerKernelChStop && arguments != nullptr;
  write_line("record %ld state %d: %lu\n", number_of(handle), state,
             has_time ? static_cast<unsigned long>(arguments->kernelCh.pTimer) : 0);
  ++vendor_events.records;
  return ncclSuccess;
}

[[maybe_unused]] ncclResult_t finish(void* context) {
  const std::lock_guard<std::mutex> lock(g_mutex);
  ++vendor_events.finalized;
  write_line("finalize %ld\n", number_of(context));
  if (context != nullptr) static_cast<Object*>(context)->live = 0;
  return ncclSuccess;
}

}  // namespace

#if VENDOR_EXPORTS & (1 << 3)
EXPORT const int ncclProfiler_v3;
const int ncclProfiler_v3 = 0;
#endif
#if VENDOR_EXPORTS & (1 << 4)
EXPORT const ncclProfiler_v4_t ncclProfiler_v4;
const ncclProfiler_v4_t ncclProfiler_v4 = {"Vendor", init_v4, start<ncclProfilerEventDescr_v4_t>,
                                           stop,     record,  finish};
#endif
#if VENDOR_EXPORTS & (1 << 5)
EXPORT const ncclProfiler_v5_t ncclProfiler_v5;
const ncclProfiler_v5_t ncclProfiler_v5 = {"Vendor", init<5>, start<ncclProfilerEventDescr_v5_t>,
                                           stop,     record,  finish};
#endif
#if VENDOR_EXPORTS & (1 << 6)
EXPORT const ncclProfiler_v6_t ncclProfiler_v6;
const ncclProfiler_v6_t ncclProfiler_v6 = {"Vendor", init<6>, start<ncclProfilerEventDescr_v6_t>,
                                           stop,     record,  finish};
#endif
