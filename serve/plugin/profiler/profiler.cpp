// From NCCL's events to records. What runs for each collective allocates nothing and makes no
// system call but reading the clock.
//
//   GroupApi, CollApi, KernelLaunch  on the calling thread: marks, and whether the mask was wide
//   Coll                             its record: goes to the recorder at once, or if sampled
//   KernelCh, and its stop           waits in a slot for the times of its channels
#include "profiler/profiler.h"

#include <algorithm>
#include <cstring>

#include "identity/communicator.h"
#include "identity/environment.h"
#include "platform/system.h"

namespace dynamiccl {
namespace {

constexpr char kName[] = "DynamICCL";
Mutex g_mutex;  // of the slots, the free profilers and the held broadcasts

// ---- When GPU times are taken: NCCL's event mask is widened for short bursts of calls
//
// While KernelCh is in the mask, every collective that is called gets proxy operations, and a plan
// that is captured in a CUDA graph then carries a host function that runs at every replay for as
// long as the graph lives (`src/enqueue.cc`). So it is wide for few calls, never for the first ones
// of a communicator (but with 100 %), and no longer once a capture shows itself.
//
// Which calls follows from NCCL's own sequence number, so that all ranks take the times of the same
// ones. NCCL reads the mask when a call is made, and starts the event of a collective when its plan
// is launched: the mask is switched by the event before.
//
// All communicators share it. Whoever is in a burst keeps it wide, and says so at each call; the
// last one that said so ends it. All together stay within the share of calls and an allowance, so
// that a burst that never ends (no more calls come, or another NCCL of the process has begun one)
// costs no more. When threads race, a call more or less is sampled, and the next puts it right.

constexpr std::uint32_t kAll = 1'000'000, kBurstCalls = 16, kAllowance = 64 * kAll;
std::atomic<const void*> g_owner{nullptr};  // of the burst; null: nobody, or two threads raced
std::atomic<std::int64_t> g_overdraft{0};   // sampled calls above the share, in millionths

bool is_wide(const int* mask) noexcept {
  return (__atomic_load_n(mask, __ATOMIC_RELAXED) & ncclProfileKernelCh) != 0;
}

void widen(int* mask, const void* who) noexcept {
  const std::int64_t with_burst = g_overdraft.load(std::memory_order_relaxed) + kBurstCalls * kAll;
  if (!is_wide(mask) && with_burst > kAllowance) return;
  g_owner.store(who, std::memory_order_relaxed);
  __atomic_fetch_or(mask, ncclProfileKernelCh, __ATOMIC_RELAXED);
}

void narrow(int* mask) noexcept {
  g_owner.store(nullptr, std::memory_order_relaxed);
  __atomic_fetch_and(mask, ~ncclProfileKernelCh, __ATOMIC_RELAXED);
}

/// The burst of `who` has ended: nothing if somebody else has kept it wide since.
void let_go(int* mask, const void* who) noexcept {
  const void* const holder = g_owner.load(std::memory_order_relaxed);
  if (holder == who || holder == nullptr) narrow(mask);
}

/// A call came by.
void count_call(int* mask, bool is_sampled, std::uint32_t sample_ppm) noexcept {
  const std::int64_t more = std::int64_t{is_sampled ? kAll : 0} - sample_ppm;
  const std::int64_t now = g_overdraft.load(std::memory_order_relaxed) + more;
  g_overdraft.store(now, std::memory_order_relaxed);
  if (is_sampled && now > kAllowance) narrow(mask);
}

bool in_burst(std::uint64_t sequence, std::uint32_t sample_ppm) noexcept {
  if (sample_ppm == 0) return false;
  const std::uint32_t period = (kAll + sample_ppm / 2) / sample_ppm;  // in bursts' worth of calls
  const auto block = static_cast<std::uint32_t>(sequence / kBurstCalls);
  return period == 1 || (block != 0 && block % period == 0);
}

// ---- NCCL's spellings (`src/collectives.cc`), in the order of its numbers

constexpr const char* kCollectives[] = {"Broadcast", "Reduce", "AllGather", "ReduceScatter",
                                        "AllReduce"};
constexpr const char* kAlgorithms[] = {
    "TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT"};
constexpr const char* kProtocols[] = {"LL", "LL128", "SIMPLE"};
constexpr const char* kDatatypes[] = {"ncclInt8",     "ncclUint8",      "ncclInt32",
                                      "ncclUint32",   "ncclInt64",      "ncclUint64",
                                      "ncclFloat16",  "ncclFloat32",    "ncclFloat64",
                                      "ncclBfloat16", "ncclFloat8e4m3", "ncclFloat8e5m2"};
constexpr std::uint8_t kElementBytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

/// kUnknown for a name that is new; what no tuner is asked about is not among the collectives.
template <std::size_t size>
std::uint8_t number_of(const char* name, const char* const (&names)[size]) noexcept {
  std::size_t i = name != nullptr ? size : 0;  // from the end, where the most frequent ones are
  while (i > 0 && std::strcmp(name, names[i - 1]) != 0) --i;
  return i > 0 ? static_cast<std::uint8_t>(i - 1) : kUnknown;
}

// ---- Handles: numbers, which NCCL keeps as pointers and only compares with null

// Bits 0-1 say of what. That of a call has bit 2 (the mask was wide), 3 (captured) and 4 (it is a
// plan); that of a group its number, from 1 on, above bit 1; those of a collective and its channels
// have the channel in bits 2-7, and above them the number of what waits in a slot.
enum HandleKind : std::uint64_t { kOfGroup = 0, kOfCall = 1, kOfCollective = 2, kOfKernel = 3 };
constexpr std::uint64_t kKindMask = 3, kChannelMask = 63;
constexpr std::uint64_t kCallIsWide = 4, kCallIsCaptured = 8, kCallIsPlan = 16;
static_assert(sizeof(void*) == 8, "a handle fits a pointer");
static_assert(kMaxChannels - 1 == kChannelMask, "a channel fits its bits, and a mask of 64");

std::atomic<std::uint64_t> g_groups{0};
std::uint64_t bits_of(void* handle) noexcept { return reinterpret_cast<std::uintptr_t>(handle); }

void* handle_of(std::uint64_t bits) noexcept {
  return reinterpret_cast<void*>(static_cast<std::uintptr_t>(bits));
}

// ---- Collectives that wait for the GPU times of their channels: all with the mutex held

/// Until all channels are done, or a later one needs the place: then its record has no times.
/// NCCL's proxy thread reports channels late, twice or never: what comes for another number is
/// nobody's.
struct Slot {
  const Profiler* owner;  // null: free
  std::uint64_t number;
  std::uint64_t done;  // a bit a channel
  CallRecord record;
};

constexpr int kSlots = 1024;
Slot g_slots[kSlots];
std::uint64_t g_latest_number = 0;

void push(const Profiler& of, const CallRecord& record) noexcept {
  const Hooks* hooks = g_hooks.load(std::memory_order_acquire);
  if (hooks != nullptr) hooks->take(of, record);
  Recorder::push(record);
}

/// The slot is free then.
void push(Slot* slot) noexcept {
  CallRecord& record = slot->record;
  // Of some channels alone the least start and the largest stop would be another, shorter time.
  if (__builtin_popcountll(slot->done) != record.num_channels || record.start_ns == 0 ||
      record.start_ns >= record.stop_ns) {
    record.start_ns = record.stop_ns = 0;
    record.flags |= kFlagIncomplete;
  }
  push(*slot->owner, record);
  slot->owner = nullptr;
}

/// Null when it is another one's by now.
Slot* slot_of(std::uint64_t bits) noexcept {
  Slot& slot = g_slots[(bits >> 8) % kSlots];
  return slot.owner != nullptr && slot.number == bits >> 8 ? &slot : nullptr;
}

// ---- NCCL's events. A start returns a handle, or null where no more needs to be heard of it

CallRecord record_of(const Profiler& profiler, int collective, std::size_t count,
                     const char* datatype) noexcept {
  CallRecord record = profiler.blank;
  record.enqueued_ns = ns_of(CLOCK_REALTIME);
  record.collective = static_cast<std::uint8_t>(collective);
  record.datatype = number_of(datatype, kDatatypes);
  // ncclUint8, the one type that NCCL's own list of names lacks, to 2.30.7.
  const bool has_no_name = record.datatype == kUnknown && datatype != nullptr;
  if (has_no_name && std::strcmp(datatype, "Unknown") == 0) record.datatype = 1;
  const std::uint64_t bytes = record.datatype < kUnknown ? kElementBytes[record.datatype] : 0;
  const bool is_per_rank = collective == kAllGather || collective == kReduceScatter;
  record.size_bytes = count * bytes * static_cast<unsigned>(is_per_rank ? record.num_ranks : 1);
  return record;
}

/// With the mutex held. Numbered as NCCL does: a captured one does not move the number.
void record_held_broadcast(Profiler* profiler) noexcept {
  if (!profiler->holds_broadcast.exchange(false, std::memory_order_relaxed)) return;
  CallRecord& held = profiler->held;
  held.sequence = profiler->latest[kBroadcast].load(std::memory_order_relaxed) + 1;
  if ((held.flags & kFlagCaptured) == 0) profiler->latest[kBroadcast].store(held.sequence);
  push(*profiler, held);
}

/// From 2.29 on NCCL makes a Broadcast a task of its own kind, and of that one an ordinary task
/// once its group is complete (2.29.7 `src/enqueue.cc:2581,367`; 2.30.7 2703,368), without event
/// mask: so neither Coll nor KernelLaunch nor KernelCh comes (2.29.7
/// `src/plugin/profiler.cc:373,438`). CollApi alone tells of it, without NCCL's number and choice,
/// and of one that is only simulated, too. A group with several roots runs as one AllGatherV, about
/// which no tuner is asked as a Broadcast: it is left out, but for what the first root sends more
/// than once. With NCCL_ALLGATHERV_ENABLE=0, and in confidential computing, Coll comes as ever.
void hear_of_broadcasts(Profiler* profiler, const ncclProfilerCollApi_v5_t& call,
                        void* group) noexcept {
  const bool is_broadcast =
      call.func != nullptr && std::strcmp(call.func, kCollectives[kBroadcast]) == 0;
  if (!is_broadcast && !profiler->holds_broadcast.load(std::memory_order_relaxed)) return;
  const Lock lock(&g_mutex);
  const bool is_same = group == profiler->held_group;
  if (is_broadcast && is_same && call.root != profiler->held_root) {
    profiler->held_root = -1;
    profiler->holds_broadcast.store(false, std::memory_order_relaxed);
    return;
  }
  if (is_broadcast || !is_same) record_held_broadcast(profiler);
  if (!is_broadcast) return;
  profiler->held = record_of(*profiler, kBroadcast, call.count, call.datatype);
  profiler->held.algorithm = profiler->held.protocol = kUnknown;
  if (call.graphCaptured) profiler->held.flags |= kFlagCaptured;
  profiler->held_group = group;
  profiler->held_root = call.root;
  profiler->holds_broadcast.store(true, std::memory_order_relaxed);
}

void* start_call(Profiler* profiler, const ncclProfilerCollApi_v5_t& call, void* group) noexcept {
  profiler->call_marks.group = group;
  const bool was_wide = is_wide(profiler->mask);
  // This call has read the mask already; those captured after it will find it narrow.
  if (call.graphCaptured && was_wide) narrow(profiler->mask);
  profiler->call_marks.set_captured(call.graphCaptured);
  if (profiler->hides_broadcasts.load(std::memory_order_relaxed)) {
    hear_of_broadcasts(profiler, call, group);
  }
  return handle_of(kOfCall | (was_wide ? kCallIsWide : 0) |
                   (call.graphCaptured ? kCallIsCaptured : 0));
}

void* start_collective(Profiler* profiler, const ncclProfilerColl_v4_t& event,
                       void* parent) noexcept {
  const std::uint8_t collective = number_of(event.func, kCollectives);
  if (collective == kUnknown) return nullptr;
  const bool is_told = collective == kBroadcast && profiler->hides_broadcasts.load();
  if (is_told) profiler->hides_broadcasts = profiler->holds_broadcast = false;  // not by this NCCL
  const Hooks* hooks = g_hooks.load(std::memory_order_acquire);
  if (hooks == nullptr && !Recorder::is_on()) return nullptr;
  CallRecord record = record_of(*profiler, collective, event.count, event.datatype);
  record.sequence = event.seqNumber;
  record.algorithm = number_of(event.algo, kAlgorithms);
  record.protocol = number_of(event.proto, kProtocols);
  record.num_channels = event.nChannels;
  record.num_warps = event.nWarps;

  const std::uint64_t call = (bits_of(parent) & kKindMask) == kOfCall ? bits_of(parent) : 0;
  const bool is_sampled = (call & kCallIsWide) != 0;
  std::atomic<std::uint64_t>& latest = profiler->latest[collective];
  // A replay does not move the number. Before 2.28 this is the only sign of one.
  const bool is_again =
      (call & kCallIsPlan) != 0 && latest.load(std::memory_order_relaxed) == event.seqNumber;
  latest.store(event.seqNumber, std::memory_order_relaxed);
  const bool is_captured = is_again || (call & kCallIsCaptured) != 0;

  count_call(profiler->mask, is_sampled, profiler->sample_ppm);
  const bool is_next_sampled = profiler->takes_times.load(std::memory_order_relaxed) ||
                               in_burst(event.seqNumber + 1, profiler->sample_ppm);
  if (!is_captured && is_next_sampled) {
    widen(profiler->mask, &latest);
  } else if (is_captured || is_sampled) {
    // But if all calls of a group were made before the burst began: then it is the next group's.
    let_go(profiler->mask, &latest);
  }
  if (is_captured) {
    // It keeps the choice of its capture, and nobody knows which table that was of.
    record.flags |= kFlagCaptured;
  } else if (hooks != nullptr) {
    hooks->describe(*profiler, &record);
  }
  if (!is_sampled || event.nChannels == 0 || event.nChannels > kMaxChannels) {
    push(*profiler, record);
    return nullptr;
  }
  const Lock lock(&g_mutex);
  // To the next free one; where there is none, round to that of the oldest.
  for (int i = 0; i <= kSlots; ++i) {
    if (g_slots[++g_latest_number % kSlots].owner == nullptr) break;
  }
  Slot& slot = g_slots[g_latest_number % kSlots];
  if (slot.owner != nullptr) push(&slot);
  record.start_ns = ~std::uint64_t{0};
  slot = {profiler, g_latest_number, 0, record};
  return handle_of(kOfCollective | g_latest_number << 8);
}

void* start_kernel(void* parent, const ncclProfilerKernelCh_v4_t& kernel) noexcept {
  const std::uint64_t bits = bits_of(parent) & ~(kChannelMask << 2);
  if ((bits & kKindMask) != kOfCollective || kernel.channelId >= kMaxChannels) return nullptr;
  const Lock lock(&g_mutex);
  Slot* slot = slot_of(bits);
  if (slot != nullptr) slot->record.start_ns = std::min(slot->record.start_ns, kernel.pTimer);
  return handle_of(bits | std::uint64_t{kernel.channelId} << 2 | kOfKernel);
}

/// In what is read of it, v4's descriptor differs from the later ones in the width of its type.
template <typename Descr>
ncclResult_t startEvent(void* context, void** eHandle, Descr* eDescr) noexcept {
  if (eHandle == nullptr || eDescr == nullptr) return ncclSuccess;
  *eHandle = nullptr;
  const auto& event = *reinterpret_cast<const ncclProfilerEventDescr_v5_t*>(eDescr);
  auto* profiler = static_cast<Profiler*>(context);
  // Of a group, which may have calls of several communicators, NCCL tells the first one's profiler
  // alone (2.30.7 `src/plugin/profiler.cc:275`), also where that one is null.
  if (eDescr->type == ncclProfileGroupApi) {
    *eHandle = handle_of(kOfGroup | ++g_groups << 2);
  } else if (profiler == nullptr) {
    return ncclSuccess;
  } else if (eDescr->type == ncclProfileCollApi) {
    *eHandle = start_call(profiler, event.collApi, event.parentObj);
  } else if (eDescr->type == ncclProfileGroup) {
    // A plan. Before 2.28 its collectives come below it, and without a handle not at all.
    *eHandle = handle_of(kOfCall | kCallIsPlan | (is_wide(profiler->mask) ? kCallIsWide : 0));
  } else if (eDescr->type == ncclProfileColl) {
    *eHandle = start_collective(profiler, event.coll, event.parentObj);
  } else if (eDescr->type == ncclProfileKernelLaunch) {
    profiler->call_marks.set_launched(event.parentObj);
  } else if (eDescr->type == ncclProfileKernelCh) {
    *eHandle = start_kernel(event.parentObj, event.kernelCh);
  } else if (eDescr->type == ncclProfileP2p && is_wide(profiler->mask)) {
    count_call(profiler->mask, true, profiler->sample_ppm);  // it costs as much
  }
  return ncclSuccess;
}

ncclResult_t recordEventState(void* eHandle, ncclProfilerEventState_t eState,
                              ncclProfilerEventStateArgs_v4_t* eStateArgs) noexcept {
  const std::uint64_t bits = bits_of(eHandle);
  const bool is_stop = eState == ncclProfilerKernelChStop && (bits & kKindMask) == kOfKernel;
  if (!is_stop || eStateArgs == nullptr) return ncclSuccess;
  const Lock lock(&g_mutex);
  Slot* slot = slot_of(bits);
  if (slot == nullptr) return ncclSuccess;
  slot->done |= std::uint64_t{1} << (bits >> 2 & kChannelMask);
  slot->record.stop_ns = std::max(slot->record.stop_ns, eStateArgs->kernelCh.pTimer);
  if (__builtin_popcountll(slot->done) >= slot->record.num_channels) push(slot);
  return ncclSuccess;
}

ncclResult_t stopEvent(void*) noexcept { return ncclSuccess; }

// ---- A communicator

Profiler* g_free = nullptr;

template <int version>
ncclResult_t init(void** context, std::uint64_t commId, int* eActivationMask, const char*,
                  int nNodes, int nranks, int rank, ncclDebugLogger_t logfn) noexcept {
  if (context == nullptr) return ncclSuccess;
  *context = nullptr;
  t_created = nullptr;
  if (in_forked_child() || eActivationMask == nullptr) return ncclSuccess;
  if (is_one("DYNAMICCL_DISABLE")) return ncclSuccess;
  const Communicator communicator = {static_cast<std::size_t>(nranks),
                                     static_cast<std::size_t>(nNodes), logfn, nullptr, commId};
  Profiler* profiler = nullptr;
  {
    const Lock lock(&g_mutex);
    profiler = g_free != nullptr ? g_free : allocate<Profiler>();
    if (profiler != nullptr) g_free = profiler->next_free;
  }
  if (profiler == nullptr) {
    say(communicator, NCCL_LOG_INFO, "records no collectives: memory is short");
    return ncclSuccess;
  }
  const int sample_ppm = sample_ppm_of(value_of("DYNAMICCL_SAMPLE_PERCENT", "1"));
  profiler->blank.comm_id = commId;
  profiler->blank.rank = rank;
  profiler->blank.num_ranks = nranks;
  profiler->blank.num_nodes = nNodes;
  profiler->mask = eActivationMask;
  profiler->sample_ppm = sample_ppm > 0 ? static_cast<std::uint32_t>(sample_ppm) : 0;
  profiler->hides_broadcasts.store(version >= 6, std::memory_order_relaxed);
  for (auto& latest : profiler->latest) latest.store(~std::uint64_t{0}, std::memory_order_relaxed);
  profiler->call_marks.begin();
  const char* problem = Recorder::acquire(profiler->sample_ppm, logfn);
  // Other bits are left as they are: they may belong to a burst.
  constexpr int kWanted = ncclProfileColl | (version >= 5 ? ncclProfileKernelLaunch : 0);
  __atomic_fetch_or(eActivationMask, kWanted, __ATOMIC_RELAXED);
  profiler->take_times((Recorder::is_on() || g_hooks.load() != nullptr) &&
                       in_burst(0, profiler->sample_ppm));
  *context = t_created = profiler;

  const char* directory = value_of("DYNAMICCL_CALLS_DIR");
  const char* files = problem == nullptr ? "calls go to " : "cannot keep calls in ";
  say(communicator, NCCL_LOG_INFO, "%s%s%s%s; GPU times of %g %% of the calls%s",
      directory == nullptr ? "keeps no calls" : files, directory != nullptr ? directory : "",
      problem != nullptr ? ": " : "", problem != nullptr ? problem : "",
      1e-4 * profiler->sample_ppm,
      sample_ppm < 0 ? " (DYNAMICCL_SAMPLE_PERCENT is not a number from 0 to 100)" : "");
  return ncclSuccess;
}

ncclResult_t init_v4(void** context, int* eActivationMask, const char* commName,
                     std::uint64_t commHash, int nNodes, int nranks, int rank,
                     ncclDebugLogger_t logfn) noexcept {
  return init<4>(context, commHash, eActivationMask, commName, nNodes, nranks, rank, logfn);
}

/// What still waits for GPU times is recorded without.
ncclResult_t finalize(void* context) noexcept {
  auto* profiler = static_cast<Profiler*>(context);
  if (profiler == nullptr || in_forked_child()) return ncclSuccess;
  profiler->take_times(false);
  {
    const Lock lock(&g_mutex);
    record_held_broadcast(profiler);
    for (Slot& slot : g_slots) {
      if (slot.owner == profiler) push(&slot);
    }
    profiler->next_free = g_free;
    g_free = profiler;
  }
  Recorder::release();
  return ncclSuccess;
}

}  // namespace

int sample_ppm_of(const char* percent) noexcept {
  // By hand: strtod depends on the locale's decimal point.
  const char* const point = std::strchr(percent, '.');
  std::int64_t ppm = 0, unit = 10'000;
  for (const char* at = percent; *at != '\0'; ++at) {
    if (at == point) continue;
    if (*at < '0' || *at > '9') return -1;
    if (point != nullptr && at > point) unit /= 10;
    ppm = (unit == 10'000 ? 10 * ppm : ppm) + unit * (*at - '0');
    if (ppm > kAll) return -1;
  }
  return std::strpbrk(percent, "0123456789") != nullptr ? static_cast<int>(ppm) : -1;
}

void Profiler::take_times(bool wanted) noexcept {
  takes_times.store(wanted && sample_ppm > 0, std::memory_order_relaxed);
  if (takes_times.load(std::memory_order_relaxed)) return widen(mask, latest);
  for (const auto& each : latest) let_go(mask, &each);
}

DYNAMICCL_EXPORT const ncclProfiler_v4_t ncclProfiler_v4 = {
    kName, init_v4, startEvent<ncclProfilerEventDescr_v4_t>, stopEvent, recordEventState, finalize};
DYNAMICCL_EXPORT const ncclProfiler_v5_t ncclProfiler_v5 = {
    kName, init<5>, startEvent<ncclProfilerEventDescr_v5_t>, stopEvent, recordEventState, finalize};
DYNAMICCL_EXPORT const ncclProfiler_v6_t ncclProfiler_v6 = {
    kName, init<6>, startEvent<ncclProfilerEventDescr_v5_t>, stopEvent, recordEventState, finalize};

}  // namespace dynamiccl
