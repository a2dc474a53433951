// A vendor's profiler: how it is found, and what NCCL holds for a communicator when there is one.
#include "next/profiler.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <new>

#include "next/library.h"
#include "platform/dynamic.h"
#include "platform/threads.h"

namespace dynamiccl {
namespace {

constexpr int kNewest = 6;
constexpr int kCeEvents = ncclProfileCeColl | ncclProfileCeSync | ncclProfileCeBatch;
constexpr std::uint32_t kMaxLinks = 4096;

NextLibrary g_vendor({kNextProfiler, "profiler", "ncclProfiler_v", 4,
                      "it exports no profiler from v4 on that this NCCL takes",
                      "is called first with every event",
                      []() noexcept { return Pairs::allocate() ? nullptr : "memory is short"; }});

// The links are used again but never freed.
Mutex g_links_mutex;
std::atomic<ProfilerLink*> g_links[kMaxLinks];
std::atomic<ProfilerLink*> g_elsewhere[kNewest + 1];
std::atomic<int> g_pid{0};

}  // namespace

const NextPlugin* ProfilerLink::find(int abi_version, ncclDebugLogger_t logger) noexcept {
  if (in_forked_child()) return nullptr;  // another thread may have held the lock
  g_pid.store(getpid(), std::memory_order_relaxed);
  return g_vendor.find(abi_version, logger);
}

void* ProfilerLink::create(const NextPlugin* next, const ProfiledCommunicator& communicator,
                           const char* name) noexcept {
  SharedMask* mask =
      communicator.event_mask != nullptr ? SharedMask::of(communicator.event_mask) : nullptr;
  if (mask == nullptr) return Profiler::create(communicator);
  ProfiledCommunicator to_ours = communicator;
  to_ours.event_mask = mask->ours();
  // Ours first: theirs gets NCCL's own int if ours wants nothing.
  Profiler* ours = Profiler::create(to_ours);
  mask->settle(ours != nullptr);
  ProfilerLink* link = take_free();
  if (link == nullptr) {
    say_of_next(kNextProfiler, communicator.logger,
                "goes on without it on a communicator: ", "memory is short");
    mask->follow(true);
    return ours;
  }
  open_elsewhere(next, mask, communicator.logger);
  link->next_ = next;
  link->mask_ = mask;
  link->ours_ = ours;
  link->logger_ = communicator.logger;
  link->has_theirs_ = link->init_theirs(communicator, name);
  mask->follow(true);
  link->call_mask_.store(mask->wanted_by_them(), std::memory_order_relaxed);
  link->is_launched_.store(true, std::memory_order_relaxed);
  if (ours == nullptr && !link->has_theirs_) {
    give_back(link);
    return nullptr;
  }
  link->open();
  return reinterpret_cast<void*>(static_cast<std::uintptr_t>(link->bits()));
}

bool ProfilerLink::init_theirs(const ProfiledCommunicator& communicator,
                               const char* name) noexcept {
  theirs_ = nullptr;
  ncclResult_t result;
  if (next_->version == 4) {
    result = next_->as<ncclProfiler_v4_t>()->init(
        &theirs_, mask_->theirs(), name, communicator.comm_id, communicator.num_nodes,
        communicator.num_ranks, communicator.rank, communicator.logger);
  } else {
    result = next_->as<ncclProfiler_v5_t>()->init(
        &theirs_, communicator.comm_id, mask_->theirs(), name, communicator.num_nodes,
        communicator.num_ranks, communicator.rank, communicator.logger);
  }
  if (result != ncclSuccess) {
    say_of_next(kNextProfiler, communicator.logger,
                "goes on without it on a communicator: ", "its init returned an error");
    return false;
  }
  // As NCCL does over a v5 plugin.
  if (next_->version == 5 && next_->abi_version > 5) {
    __atomic_fetch_and(mask_->theirs(), ~kCeEvents, __ATOMIC_SEQ_CST);
  }
  return true;
}

/// The link through which events of other processes' communicators pass: NCCL's context and parent
/// are theirs, so that of ours nothing is known, and a vendor tells them by their `pid`.
void ProfilerLink::open_elsewhere(const NextPlugin* next, SharedMask* mask,
                                  ncclDebugLogger_t logger) noexcept {
  std::atomic<ProfilerLink*>& elsewhere = g_elsewhere[next->abi_version];
  if (elsewhere.load() != nullptr) return;
  ProfilerLink* link = take_free();
  if (link == nullptr) return;
  link->next_ = next;
  link->mask_ = mask;
  link->logger_ = logger;
  link->has_theirs_ = true;
  link->is_elsewhere_ = true;
  link->open();
  ProfilerLink* none = nullptr;
  if (elsewhere.compare_exchange_strong(none, link)) return;
  link->generation_.store(0);
  give_back(link);
}

ProfilerLink* ProfilerLink::take_free() noexcept {
  const Lock lock(&g_links_mutex);
  for (std::uint32_t i = 0; i < kMaxLinks; ++i) {
    ProfilerLink* link = g_links[i].load(std::memory_order_relaxed);
    if (link == nullptr) {
      void* memory = std::malloc(sizeof(ProfilerLink));
      if (memory == nullptr) return nullptr;
      link = new (memory) ProfilerLink;
      link->index_ = i;
      g_links[i].store(link, std::memory_order_release);
    }
    if (!link->is_taken_) {
      link->is_taken_ = true;
      return link;
    }
  }
  return nullptr;
}

void ProfilerLink::give_back(ProfilerLink* link) noexcept {
  link->ours_ = nullptr;
  link->theirs_ = nullptr;
  link->has_theirs_ = false;
  link->is_elsewhere_ = false;
  link->lost_.store(0, std::memory_order_relaxed);
  const Lock lock(&g_links_mutex);
  link->is_taken_ = false;
}

void ProfilerLink::open() noexcept {
  if (++last_generation_ == 0) last_generation_ = 1;
  generation_.store(last_generation_);
}

std::uint64_t ProfilerLink::bits() const noexcept {
  return 1 | std::uint64_t{index_} << 2 | std::uint64_t{last_generation_} << 32;
}

ProfilerLink* ProfilerLink::place_of(std::uint64_t context) noexcept {
  const std::uint64_t index = context >> 2 & 0xffff;
  if ((context & 1) == 0 || index >= kMaxLinks || generation_of(context) == 0) return nullptr;
  return g_links[index].load(std::memory_order_acquire);
}

const ProfilerLink* ProfilerLink::elsewhere(int abi_version) noexcept {
  return g_elsewhere[abi_version].load(std::memory_order_acquire);
}

bool ProfilerLink::is_of_this_process(int pid) noexcept {
  return pid == g_pid.load(std::memory_order_relaxed);
}

bool ProfilerLink::is_gone(std::uint64_t context) noexcept {
  const ProfilerLink* link = place_of(context);
  return link == nullptr || link->generation_.load() != generation_of(context);
}

void ProfilerLink::finalize(void* context) noexcept {
  const std::uint64_t bits = reinterpret_cast<std::uintptr_t>(context);
  ProfilerLink* link = place_of(bits);
  std::uint32_t generation = generation_of(bits);
  if (link == nullptr || !link->generation_.compare_exchange_strong(generation, 0)) return;
  if (link->ours_ != nullptr) link->ours_->finalize();
  link->mask_->follow(true);
  const bool is_forked = in_forked_child();  // those inside are not here
  if (!is_forked) wait_until([link] { return link->inside_.load() == 0; });
  // 2.27 does it without a context too.
  if (link->has_theirs_ && (link->theirs_ != nullptr || link->next_->abi_version == 4)) {
    link->next_->as<ncclProfiler_v4_t>()->finalize(link->theirs_);
  }
  const std::uint64_t lost = link->lost_.load();
  if (lost != 0) {
    char count[32];
    std::snprintf(count, sizeof count, "%llu", static_cast<unsigned long long>(lost));
    say_of_next(kNextProfiler, link->logger_, "events that did not reach it: ", count);
  }
  link->mask_->follow(true);
  if (!is_forked && link->inside_.load() == 0) give_back(link);
}

}  // namespace dynamiccl
