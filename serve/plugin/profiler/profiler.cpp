// Creation comes first; below it what runs for each collective, which allocates nothing and makes
// no system call but reading the clock. A lock is taken for Broadcasts and sampled calls alone.
#include "profiler/profiler.h"

#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "identity/environment.h"
#include "platform/allocate.h"
#include "profiler/created.h"

namespace dynamiccl {
namespace {

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
constexpr std::uint8_t kUint8 = 1;

/// kUnknown for a name that is new; what no tuner is asked about is not among the collectives.
template <std::size_t size>
std::uint8_t number_of(const char* name, const char* const (&names)[size]) noexcept {
  for (std::size_t i = 0; name != nullptr && i < size; ++i) {
    if (std::strcmp(name, names[i]) == 0) return static_cast<std::uint8_t>(i);
  }
  return kUnknown;
}

std::uint8_t datatype_of(const char* name) noexcept {
  // The one type that NCCL's own list of names lacks, to 2.30.7.
  if (name != nullptr && std::strcmp(name, "Unknown") == 0) return kUint8;
  return number_of(name, kDatatypes);
}

// ---- Handles, which NCCL keeps as pointers and only compares with null

// bits 0-1 what it is of; 2-7 channel; 8-31 slot; 32-63 generation. That of a call has bit 2 (the
// mask was wide), 3 (captured) and 4 (it is a plan) instead; that of a group its number, from 1 on,
// above bit 1.
enum HandleKind : std::uint64_t { kOfGroup = 0, kOfCall = 1, kOfCollective = 2, kOfKernel = 3 };
constexpr std::uint64_t kKindMask = 3, kChannelMask = 63;
constexpr std::uint64_t kCallIsWide = 4, kCallIsCaptured = 8, kCallIsPlan = 16;
static_assert(sizeof(void*) == 8, "a handle fits a pointer");
static_assert(kMaxChannels - 1 == kChannelMask, "a channel fits its bits, and a mask of 64");

std::uint64_t bits_of(void* handle) noexcept { return reinterpret_cast<std::uintptr_t>(handle); }

void* handle_of(std::uint64_t bits) noexcept {
  return reinterpret_cast<void*>(static_cast<std::uintptr_t>(bits));
}

// ---- Collectives that wait for the GPU times of their channels

/// Lives until the collective has ended and all its channels are done, then its record is pushed;
/// or until a newer one needs the place, then it is pushed without times. NCCL's proxy thread
/// reports channels late, twice or never: what comes for another generation is nobody's.
struct Slot {
  const Profiler* owner;  // null: free
  std::uint32_t generation;
  bool has_ended;
  std::uint64_t began, stamped, ended;  // a bit a channel
  CallRecord record;
};

constexpr std::uint32_t kSlots = 1024;
Mutex g_mutex;  // of these
Slot g_slots[kSlots];
std::uint32_t g_next_slot = 0;
Profiler* g_free = nullptr;

/// The slot's record, whose place is free from now on.
CallRecord taken_from(Slot* slot) noexcept {
  CallRecord& record = slot->record;
  const bool is_whole = __builtin_popcountll(slot->began) == record.num_channels &&
                        slot->stamped == slot->began && record.start_ns != 0 &&
                        record.start_ns < record.stop_ns;
  // Of some channels alone the least start and the largest stop would be another, shorter time.
  if (!is_whole) {
    record.start_ns = record.stop_ns = 0;
    record.flags |= kFlagIncomplete;
  }
  slot->owner = nullptr;
  return record;
}

/// Keeps `record`, of which as many channels will be reported as it has. Returns its handle.
void* wait_for_times(const Profiler* owner, const CallRecord& record) noexcept {
  CallRecord oldest;
  bool has_oldest = false;
  std::uint64_t bits = kOfCollective;
  {
    const Lock lock(&g_mutex);
    std::uint32_t index = g_next_slot++ % kSlots;
    // Round and round to the next free one; where there is none, that of the oldest.
    for (std::uint32_t i = 0; i < kSlots && g_slots[index].owner != nullptr; ++i) {
      index = g_next_slot++ % kSlots;
    }
    Slot& slot = g_slots[index];
    has_oldest = slot.owner != nullptr;
    if (has_oldest) oldest = taken_from(&slot);
    slot = {owner, slot.generation + 1, false, 0, 0, 0, record};
    slot.record.start_ns = ~std::uint64_t{0};
    bits |= std::uint64_t{index} << 8 | std::uint64_t{slot.generation} << 32;
  }
  if (has_oldest) Recorder::push(oldest);
  return handle_of(bits);
}

/// Changes the slot that a handle names, if it is that one's still.
template <typename Change>
void update(std::uint64_t bits, const Change& change) noexcept {
  CallRecord record;
  {
    const Lock lock(&g_mutex);
    Slot& slot = g_slots[(bits >> 8 & 0xffffff) % kSlots];
    if (slot.owner == nullptr || slot.generation != bits >> 32) return;
    change(&slot, std::uint64_t{1} << (bits >> 2 & kChannelMask));
    if (!slot.has_ended || __builtin_popcountll(slot.ended) < slot.record.num_channels) return;
    record = taken_from(&slot);
  }
  Recorder::push(record);
}

__attribute__((format(printf, 2, 3))) void say(const ProfiledCommunicator& communicator,
                                               const char* format, ...) noexcept {
  if (communicator.logger == nullptr) return;
  char line[512];
  const int head = std::snprintf(line, sizeof line, "DYNAMICCL: rank %d of %d: ", communicator.rank,
                                 communicator.num_ranks);
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(line + head, sizeof line - static_cast<std::size_t>(head), format, arguments);
  va_end(arguments);
  communicator.logger(NCCL_LOG_INFO, NCCL_INIT, "dynamiccl", __LINE__, "%s", line);
}

}  // namespace

Profiler* Profiler::create(const ProfiledCommunicator& communicator) noexcept {
  CreatedCommunicator created = {communicator.comm_id, communicator.rank, communicator.num_ranks,
                                 communicator.num_nodes, nullptr};
  remember_created(created);
  if (in_forked_child() || communicator.event_mask == nullptr) return nullptr;
  if (is_one("DYNAMICCL_DISABLE")) return nullptr;

  EventMask* mask = EventMask::of(communicator.event_mask);
  Profiler* profiler = nullptr;
  if (mask != nullptr) {
    const Lock lock(&g_mutex);
    profiler = g_free != nullptr ? g_free : allocate<Profiler>();
    if (profiler == g_free && profiler != nullptr) g_free = profiler->next_free_;
  }
  if (profiler == nullptr) {
    say(communicator, "records no collectives: memory is short");
    return nullptr;
  }
  const char* percent = value_of("DYNAMICCL_SAMPLE_PERCENT");
  const int sample_ppm = sample_ppm_of(percent != nullptr ? percent : "1");
  profiler->comm_id_ = communicator.comm_id;
  profiler->rank_ = communicator.rank;
  profiler->num_ranks_ = communicator.num_ranks;
  profiler->num_nodes_ = communicator.num_nodes;
  profiler->mask_ = mask;
  profiler->sample_ppm_ = sample_ppm > 0 ? static_cast<std::uint32_t>(sample_ppm) : 0;
  profiler->hides_broadcasts_.store(communicator.hides_broadcasts, std::memory_order_relaxed);
  profiler->num_broadcasts_ = 0;
  for (auto& latest : profiler->latest_) latest.store(~std::uint64_t{0}, std::memory_order_relaxed);
  const char* problem = Recorder::acquire(profiler->sample_ppm_, communicator.logger);
  profiler->marks_.begin(communicator.has_launches);
  mask->begin(communicator.has_launches);
  if (Recorder::is_on() && in_burst(0, profiler->sample_ppm_)) {
    mask->widen(profiler, profiler->sample_ppm_);
  }
  created.profiler = profiler;
  remember_created(created);

  const char* directory = value_of("DYNAMICCL_CALLS_DIR");
  say(communicator, "%s%s%s%s; GPU times of %g %% of the calls%s",
      directory == nullptr ? "keeps no calls"
                           : (problem == nullptr ? "calls go to " : "cannot keep calls in "),
      directory != nullptr ? directory : "", problem != nullptr ? ": " : "",
      problem != nullptr ? problem : "", 1e-4 * profiler->sample_ppm_,
      sample_ppm < 0 ? " (DYNAMICCL_SAMPLE_PERCENT is not a number from 0 to 100)" : "");
  return profiler;
}

void Profiler::finalize() noexcept {
  if (in_forked_child()) return;
  take_times(false);
  set_describe(nullptr, nullptr);
  {
    const Lock lock(&mutex_);
    record_held_broadcast();
  }
  for (Slot& slot : g_slots) {
    CallRecord record;
    {
      const Lock lock(&g_mutex);
      if (slot.owner != this) continue;
      record = taken_from(&slot);
    }
    Recorder::push(record);
  }
  Recorder::release();
  const Lock lock(&g_mutex);
  next_free_ = g_free;
  g_free = this;
}

CallRecord Profiler::record_of(int collective, std::size_t count,
                               const char* datatype) const noexcept {
  CallRecord record = {};
  record.comm_id = comm_id_;
  record.enqueued_ns = realtime_ns();
  record.rank = rank_;
  record.num_ranks = num_ranks_;
  record.num_nodes = num_nodes_;
  record.collective = static_cast<std::uint8_t>(collective);
  record.datatype = datatype_of(datatype);
  const std::uint64_t bytes = record.datatype < kUnknown ? kElementBytes[record.datatype] : 0;
  const bool is_per_rank = collective == kAllGather || collective == kReduceScatter;
  record.size_bytes = count * bytes * static_cast<std::uint64_t>(is_per_rank ? num_ranks_ : 1);
  return record;
}

void* Profiler::start_group() noexcept {
  static std::atomic<std::uint64_t> number{0};
  return handle_of(kOfGroup | (number.fetch_add(1, std::memory_order_relaxed) + 1) << 2);
}

void* Profiler::start_plan() noexcept {
  return handle_of(kOfCall | kCallIsPlan | (mask_->is_wide() ? kCallIsWide : 0));
}

void* Profiler::start_call(const ncclProfilerCollApi_v5_t& call, void* group) noexcept {
  marks_.group = group;
  const bool is_wide = mask_->is_wide();
  // This call has read the mask already; those captured after it will find it narrow.
  if (call.graphCaptured && is_wide) mask_->narrow();
  marks_.set_captured(call.graphCaptured);
  if (hides_broadcasts_.load(std::memory_order_relaxed)) hear_of_broadcasts(call, group);
  return handle_of(kOfCall | (is_wide ? kCallIsWide : 0) |
                   (call.graphCaptured ? kCallIsCaptured : 0));
}

/// From 2.29 on NCCL makes a Broadcast a task of its own kind, and of that one an ordinary task
/// once its group is complete (2.29.7 `src/enqueue.cc:2581,367`; 2.30.7 2703,368), without event
/// mask: so neither Coll nor KernelLaunch nor KernelCh comes (2.29.7
/// `src/plugin/profiler.cc:373,438`). CollApi alone tells of it, without NCCL's number and choice,
/// and of one that is only simulated, too. A group with several roots runs as one AllGatherV, about
/// which no tuner is asked as a Broadcast: it is left out, but for what the first root sends more
/// than once. With NCCL_ALLGATHERV_ENABLE=0, and in confidential computing, Coll comes as ever.
void Profiler::hear_of_broadcasts(const ncclProfilerCollApi_v5_t& call, void* group) noexcept {
  const bool is_broadcast =
      call.func != nullptr && std::strcmp(call.func, kCollectives[kBroadcast]) == 0;
  if (!is_broadcast && !holds_broadcast_.load(std::memory_order_relaxed)) return;
  const Lock lock(&mutex_);
  if (group != held_group_) {
    record_held_broadcast();
    has_many_roots_ = false;
  }
  if (!is_broadcast) return;
  has_many_roots_ |= group == held_group_ && call.root != held_root_;
  if (has_many_roots_) {
    holds_broadcast_.store(false, std::memory_order_relaxed);
    return;
  }
  record_held_broadcast();
  held_ = record_of(kBroadcast, call.count, call.datatype);
  held_.algorithm = held_.protocol = kUnknown;
  if (call.graphCaptured) held_.flags |= kFlagCaptured;
  held_group_ = group;
  held_root_ = call.root;
  holds_broadcast_.store(true, std::memory_order_relaxed);
}

/// With the mutex held. Numbered as NCCL does: a captured one does not move the number.
void Profiler::record_held_broadcast() noexcept {
  if (!holds_broadcast_.exchange(false, std::memory_order_relaxed)) return;
  held_.sequence = num_broadcasts_;
  if ((held_.flags & kFlagCaptured) == 0) ++num_broadcasts_;
  if (Recorder::is_on()) Recorder::push(held_);
}

void Profiler::take_times(bool wanted) noexcept {
  takes_times_.store(wanted && sample_ppm_ > 0, std::memory_order_relaxed);
  if (takes_times_.load(std::memory_order_relaxed)) return mask_->widen(this, sample_ppm_);
  mask_->let_go(this);
  for (const auto& latest : latest_) mask_->let_go(&latest);
}

void* Profiler::start_collective(const ncclProfilerColl_v4_t& event, void* parent) noexcept {
  const std::uint8_t collective = number_of(event.func, kCollectives);
  if (collective == kUnknown) return nullptr;
  if (collective == kBroadcast && hides_broadcasts_.load(std::memory_order_relaxed)) {  // not here
    const Lock lock(&mutex_);
    hides_broadcasts_.store(false, std::memory_order_relaxed);
    holds_broadcast_.store(false, std::memory_order_relaxed);
  }
  if (!Recorder::is_on()) return nullptr;
  CallRecord record = record_of(collective, event.count, event.datatype);
  record.sequence = event.seqNumber;
  record.algorithm = number_of(event.algo, kAlgorithms);
  record.protocol = number_of(event.proto, kProtocols);
  record.num_channels = event.nChannels;
  record.num_warps = event.nWarps;

  const std::uint64_t call = bits_of(parent);
  const bool is_known = (call & kKindMask) == kOfCall;
  const bool is_sampled = is_known && (call & kCallIsWide) != 0;
  std::atomic<std::uint64_t>& latest = latest_[collective];
  // A replay does not move the number. Before 2.28 this is the only sign of one.
  const bool is_again =
      (call & kCallIsPlan) != 0 && latest.load(std::memory_order_relaxed) == event.seqNumber;
  latest.store(event.seqNumber, std::memory_order_relaxed);
  const bool is_captured = is_again || (is_known && (call & kCallIsCaptured) != 0);
  if (is_captured) record.flags |= kFlagCaptured;

  mask_->count(is_sampled, sample_ppm_);
  const bool is_next_sampled =
      takes_times_.load(std::memory_order_relaxed) || in_burst(event.seqNumber + 1, sample_ppm_);
  if (!is_captured && is_next_sampled) {
    mask_->widen(&latest, sample_ppm_);
  } else if (is_captured || is_sampled) {
    // But if all calls of a group were made before the burst began: then it is the next group's.
    mask_->let_go(&latest);
  }
  // A captured call keeps the choice of its capture, and nobody knows which table that was of.
  if (!is_captured) describe_.call(&record);

  const bool has_channels = event.nChannels > 0 && event.nChannels <= kMaxChannels;
  if (is_sampled && has_channels) return wait_for_times(this, record);
  Recorder::push(record);
  return nullptr;
}

void* Profiler::start_kernel(void* parent, int channel, std::uint64_t gpu_ns) noexcept {
  const std::uint64_t bits = bits_of(parent) & ~(kChannelMask << 2);
  if ((bits & kKindMask) != kOfCollective || channel < 0 || channel >= kMaxChannels) return nullptr;
  const std::uint64_t handle = bits | static_cast<std::uint64_t>(channel) << 2 | kOfKernel;
  update(handle, [gpu_ns](Slot* slot, std::uint64_t bit) {
    slot->began |= bit;
    if (gpu_ns < slot->record.start_ns) slot->record.start_ns = gpu_ns;
  });
  return handle_of(handle);
}

void Profiler::stop_kernel(void* handle, std::uint64_t gpu_ns) noexcept {
  if ((bits_of(handle) & kKindMask) != kOfKernel) return;
  update(bits_of(handle), [gpu_ns](Slot* slot, std::uint64_t bit) {
    slot->stamped |= bit;
    if (gpu_ns > slot->record.stop_ns) slot->record.stop_ns = gpu_ns;
  });
}

void Profiler::stop(void* handle) noexcept {
  const std::uint64_t kind = bits_of(handle) & kKindMask;
  if (kind == kOfCollective) {
    update(bits_of(handle), [](Slot* slot, std::uint64_t) { slot->has_ended = true; });
  } else if (kind == kOfKernel) {
    update(bits_of(handle), [](Slot* slot, std::uint64_t bit) { slot->ended |= bit; });
  }
}

}  // namespace dynamiccl
