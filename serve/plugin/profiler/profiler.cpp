// Creation comes first; below it what runs for each collective, which takes no lock, allocates
// nothing and makes no system call but reading the clock.
#include "profiler/profiler.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

#include "identity/environment.h"
#include "platform/barriers.h"
#include "platform/threads.h"
#include "profiler/created.h"
#include "profiler/names.h"
#include "profiler/recorder.h"

namespace dynamiccl {
namespace {

constexpr std::uint32_t kMaxProfilers = 4096;
constexpr char kDefaultPercent[] = "1";

std::atomic<Profiler*> g_table[kMaxProfilers];

// Made when the library is loaded and never destroyed: at exit other threads may still be running.
alignas(Mutex) unsigned char g_mutex_memory[sizeof(Mutex)];

__attribute__((constructor)) void make_mutex() { new (g_mutex_memory) Mutex; }

Mutex* table_mutex() noexcept { return std::launder(reinterpret_cast<Mutex*>(g_mutex_memory)); }

// A handle, which NCCL keeps as a pointer and only compares with null:
//   bits 0-1 what it is of; 2-7 channel; 8-15 slot; 16-31 profiler; 32-63 generation.
// That of a call has bit 2 (the mask was wide), 3 (captured) and 4 (it is a plan) instead; that of
// a group its number, from 1 on, above bit 1.
enum HandleKind : std::uint64_t { kOfGroup = 0, kOfCall = 1, kOfCollective = 2, kOfKernel = 3 };
constexpr std::uint64_t kKindMask = 3;
constexpr std::uint64_t kCallIsWide = 4;
constexpr std::uint64_t kCallIsCaptured = 8;
constexpr std::uint64_t kCallIsPlan = 16;
static_assert(Pending::kSlots == 256 && Pending::kMaxChannels == 64 && kMaxProfilers <= 1U << 16,
              "they fit their bits");
static_assert(sizeof(void*) == 8, "a handle fits a pointer");

std::uint64_t bits_of(void* handle) noexcept { return reinterpret_cast<std::uintptr_t>(handle); }

void* handle_of(std::uint64_t bits) noexcept {
  return reinterpret_cast<void*>(static_cast<std::uintptr_t>(bits));
}

/// The pool that a handle of a collective or kernel points into.
struct Target {
  Pending::Ticket ticket;
  std::uint32_t profiler;
  int channel;
};

Target target_of(std::uint64_t bits) noexcept {
  return {{static_cast<std::uint32_t>(bits >> 32), static_cast<std::uint8_t>(bits >> 8)},
          static_cast<std::uint32_t>(bits >> 16 & 0xffff),
          static_cast<int>(bits >> 2 & 63)};
}

__attribute__((format(printf, 2, 3))) void say(const ProfiledCommunicator& communicator,
                                               const char* format, ...) noexcept {
  if (communicator.logger == nullptr) return;
  char line[512];
  va_list arguments;
  va_start(arguments, format);
  const int length = std::vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);
  if (length >= 0) {
    communicator.logger(NCCL_LOG_INFO, NCCL_INIT, "dynamiccl", __LINE__, "%s", line);
  }
}

std::uint64_t size_bytes_of(const ncclProfilerColl_v4_t& event, const CallRecord& record) noexcept {
  const bool is_per_rank = record.collective == kAllGather || record.collective == kReduceScatter;
  const auto ranks = static_cast<std::uint64_t>(is_per_rank ? record.num_ranks : 1);
  return event.count * element_bytes(record.datatype) * ranks;
}

}  // namespace

Profiler* Profiler::create(const ProfiledCommunicator& communicator) noexcept {
  CreatedCommunicator join = {communicator.comm_id, communicator.rank, communicator.num_ranks,
                              communicator.num_nodes, nullptr};
  remember_created(join);
  if (in_forked_child() || communicator.event_mask == nullptr) return nullptr;
  if (is_one("DYNAMICCL_DISABLE")) return nullptr;

  EventMask* mask = EventMask::of(communicator.event_mask);
  Profiler* profiler = mask != nullptr ? take_free() : nullptr;
  if (profiler == nullptr) {
    say(communicator, "DYNAMICCL: rank %d of %d: records no collectives: memory is short",
        communicator.rank, communicator.num_ranks);
    return nullptr;
  }
  const char* percent = value_of("DYNAMICCL_SAMPLE_PERCENT");
  const int sample_ppm = sample_ppm_of(percent != nullptr ? percent : kDefaultPercent);
  profiler->comm_id_ = communicator.comm_id;
  profiler->rank_ = communicator.rank;
  profiler->num_ranks_ = communicator.num_ranks;
  profiler->num_nodes_ = communicator.num_nodes;
  profiler->mask_ = mask;
  profiler->sample_ppm_ = sample_ppm > 0 ? static_cast<std::uint32_t>(sample_ppm) : 0;
  profiler->period_ = burst_period(profiler->sample_ppm_);
  for (auto& latest : profiler->latest_) latest.store(~std::uint64_t{0}, std::memory_order_relaxed);
  const char* mode = value_of("DYNAMICCL_MODE");
  Recorder::set_sampling(profiler->sample_ppm_, mode != nullptr ? mode : "observe");
  const char* problem = Recorder::acquire();
  profiler->marks_.begin(communicator.has_launches);
  mask->begin(communicator.has_launches);
  for (Bursts& bursts : profiler->bursts_) {
    if (!Recorder::is_on()) break;
    // As if the call before the first had started: with 100 % that one is in a burst.
    bursts.step(mask, ~std::uint64_t{0}, profiler->period_, profiler->sample_ppm_, false);
  }
  join.profiler = profiler;
  remember_created(join);

  const char* directory = value_of("DYNAMICCL_CALLS_DIR");
  say(communicator, "DYNAMICCL: rank %d of %d: %s%s%s%s; GPU times of %g %% of the calls%s",
      communicator.rank, communicator.num_ranks,
      directory == nullptr ? "keeps no calls"
                           : (problem == nullptr ? "calls go to " : "cannot keep calls in "),
      directory != nullptr ? directory : "", problem != nullptr ? ": " : "",
      problem != nullptr ? problem : "", 1e-4 * profiler->sample_ppm_,
      sample_ppm < 0 ? " (DYNAMICCL_SAMPLE_PERCENT is not a number from 0 to 100)" : "");
  return profiler;
}

Profiler* Profiler::take_free() noexcept {
  const Lock lock(table_mutex());
  for (std::uint32_t i = 0; i < kMaxProfilers; ++i) {
    Profiler* profiler = g_table[i].load(std::memory_order_relaxed);
    if (profiler == nullptr) {
      // malloc and placement: plain `new` would need the C++ runtime, and can throw.
      void* memory = std::malloc(sizeof(Profiler));
      if (memory == nullptr) return nullptr;
      profiler = new (memory) Profiler;
      profiler->index_ = i;
      if (!profiler->pending_.allocate()) {
        std::free(memory);
        return nullptr;
      }
      g_table[i].store(profiler, std::memory_order_release);
    }
    if (!profiler->is_taken_) {
      profiler->is_taken_ = true;
      return profiler;
    }
  }
  return nullptr;
}

void Profiler::finalize() noexcept {
  if (in_forked_child()) return;
  take_times(false);
  for (Bursts& bursts : bursts_) bursts.end(mask_);
  set_describe(nullptr, nullptr);
  pending_.flush();
  Recorder::release();
  const Lock lock(table_mutex());
  is_taken_ = false;
}

bool Profiler::set_describe(Describe describe, void* user) noexcept {
  describe_.store(nullptr);
  if (!wait_until([this] { return describing_.load() == 0; })) return false;
  describe_user_.store(user, std::memory_order_relaxed);
  describe_.store(describe);
  return true;
}

void Profiler::describe(CallRecord* record) noexcept {
  if (describe_.load(std::memory_order_relaxed) == nullptr) return;
  describing_.fetch_add(1);
  const Describe describe = describe_.load();
  if (describe != nullptr) describe(describe_user_.load(std::memory_order_relaxed), record);
  describing_.fetch_sub(1, std::memory_order_release);
}

void* Profiler::start_group() noexcept {
  static std::atomic<std::uint64_t> number{0};
  return handle_of(kOfGroup | (number.fetch_add(1, std::memory_order_relaxed) + 1) << 2);
}

void* Profiler::start_call(bool is_plan, bool is_captured, void* group) noexcept {
  marks_.group = group;
  const bool is_wide = mask_->is_wide();
  // This call has read the mask already; those captured after it will find it narrow.
  if (is_captured && is_wide) mask_->narrow();
  if (!is_plan) marks_.set_captured(is_captured);
  return handle_of(kOfCall | (is_wide ? kCallIsWide : 0) | (is_captured ? kCallIsCaptured : 0) |
                   (is_plan ? kCallIsPlan : 0));
}

void Profiler::take_times(bool wanted) noexcept {
  if (wanted && probe_epoch_ == 0 && sample_ppm_ > 0) {
    probe_epoch_ = mask_->hold(sample_ppm_);  // 0 when that would be beyond the budget
  } else if (!wanted && probe_epoch_ != 0) {
    mask_->let_go(probe_epoch_);
    probe_epoch_ = 0;
  }
}

void* Profiler::start_collective(const ncclProfilerColl_v4_t& event, void* parent) noexcept {
  if (!Recorder::is_on()) return nullptr;
  CallRecord record = {};
  record.collective = collective_of(event.func);
  if (record.collective == kUnknown) return nullptr;
  record.comm_id = comm_id_;
  record.sequence = event.seqNumber;
  record.enqueued_ns = realtime_ns();
  record.rank = rank_;
  record.num_ranks = num_ranks_;
  record.num_nodes = num_nodes_;
  record.algorithm = algorithm_of(event.algo);
  record.protocol = protocol_of(event.proto);
  record.num_channels = event.nChannels;
  record.num_warps = event.nWarps;
  record.datatype = datatype_of(event.datatype);
  record.size_bytes = size_bytes_of(event, record);

  const std::uint64_t call = bits_of(parent);
  const bool is_known = (call & kKindMask) == kOfCall;
  const bool is_sampled = is_known && (call & kCallIsWide) != 0;
  std::atomic<std::uint64_t>& latest = latest_[record.collective];
  // A replay does not move the number. Before 2.28 this is the only sign of one.
  const bool is_again =
      (call & kCallIsPlan) != 0 && latest.load(std::memory_order_relaxed) == event.seqNumber;
  latest.store(event.seqNumber, std::memory_order_relaxed);
  const bool is_captured = is_again || (is_known && (call & kCallIsCaptured) != 0);
  if (is_captured) record.flags |= kFlagCaptured;

  Bursts& bursts = bursts_[record.collective];
  mask_->count(is_sampled, sample_ppm_);
  if (is_captured) {
    bursts.end(mask_);
  } else {
    bursts.step(mask_, event.seqNumber, period_, sample_ppm_, is_sampled);
  }
  // A captured call keeps the choice of its capture, and nobody knows which table that was of.
  if (!is_captured) describe(&record);

  Pending::Ticket ticket;
  const bool has_channels = event.nChannels > 0 && event.nChannels <= Pending::kMaxChannels;
  if (is_sampled && has_channels && pending_.begin(record, &ticket)) {
    return handle_of(kOfCollective | std::uint64_t{ticket.slot} << 8 | std::uint64_t{index_} << 16 |
                     std::uint64_t{ticket.generation} << 32);
  }
  Recorder::push(record);
  return nullptr;
}

void Profiler::start_other() noexcept {
  // Sends and receives are not recorded, but cost as much while the mask is wide.
  if (mask_->is_wide()) mask_->count(true, sample_ppm_);
}

void* Profiler::start_kernel(void* parent, int channel, std::uint64_t gpu_ns) noexcept {
  const std::uint64_t bits = bits_of(parent);
  if ((bits & kKindMask) != kOfCollective || channel < 0 || channel >= Pending::kMaxChannels) {
    return nullptr;
  }
  const Target target = target_of(bits);
  if (target.profiler >= kMaxProfilers) return nullptr;
  Profiler* profiler = g_table[target.profiler].load(std::memory_order_acquire);
  if (profiler == nullptr) return nullptr;
  profiler->pending_.channel_begin(target.ticket, channel, gpu_ns);
  return handle_of((bits & ~std::uint64_t{0xff}) | static_cast<std::uint64_t>(channel) << 2 |
                   kOfKernel);
}

void Profiler::stop_kernel(void* handle, std::uint64_t gpu_ns) noexcept {
  const std::uint64_t bits = bits_of(handle);
  const Target target = target_of(bits);
  if ((bits & kKindMask) != kOfKernel || target.profiler >= kMaxProfilers) return;
  Profiler* profiler = g_table[target.profiler].load(std::memory_order_acquire);
  if (profiler != nullptr) profiler->pending_.channel_stamp(target.ticket, target.channel, gpu_ns);
}

void Profiler::stop(void* handle) noexcept {
  const std::uint64_t bits = bits_of(handle);
  const Target target = target_of(bits);
  const std::uint64_t kind = bits & kKindMask;
  if ((kind != kOfCollective && kind != kOfKernel) || target.profiler >= kMaxProfilers) return;
  Profiler* profiler = g_table[target.profiler].load(std::memory_order_acquire);
  if (profiler == nullptr) return;
  if (kind == kOfCollective) {
    profiler->pending_.end(target.ticket);
  } else {
    profiler->pending_.channel_end(target.ticket, target.channel);
  }
}

}  // namespace dynamiccl
