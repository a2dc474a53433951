// A vendor's profiler behind ours: called first with every event that it would get without us, with
// a mask, contexts and handles of its own.
//
// Environment (read once per process, when the first communicator is created):
//   DYNAMICCL_NEXT_PROFILER  the vendor's plugin: a path or soname, or NAME for
//                            libnccl-profiler-NAME.so, as NCCL_PROFILER_PLUGIN takes it. It must
//                            export v4 of the ABI or a newer one.
#pragma once

#include <atomic>
#include <cstdint>

#include "../profiler.h"  // not this one: quotes look here first
#include "next/library.h"
#include "next/pairs.h"
#include "next/shared_mask.h"

namespace dynamiccl {

inline constexpr char kNextProfiler[] = "DYNAMICCL_NEXT_PROFILER";

/// What NCCL holds for a communicator when there is a next profiler: ours, which may be null, and
/// theirs. NCCL's context is a number, index and generation, so that a late event finds nothing.
/// Its low bit is set, since without a next profiler NCCL holds a Profiler.
class ProfilerLink {
 public:
  /// The next profiler's functions for NCCL's version `abi_version`; null when there is none. A
  /// plugin that cannot be used costs one line in the log.
  static const NextPlugin* find(int abi_version, ncclDebugLogger_t logger) noexcept;

  /// Ours and theirs, as NCCL's context; null when neither wants to hear of the communicator. An
  /// error of theirs costs theirs alone.
  static void* create(const NextPlugin* next, const ProfiledCommunicator& communicator,
                      const char* name) noexcept;

  static bool is_context(void* context) noexcept {
    return (reinterpret_cast<std::uintptr_t>(context) & 1) != 0;
  }

  /// An event starts; returns NCCL's handle of it.
  static void* start(int abi_version, void* context,
                     const ncclProfilerEventDescr_v5_t& event) noexcept;
  /// The same with NCCL 2.27's descriptor.
  static void* start(void* context, const ncclProfilerEventDescr_v4_t& event) noexcept;

  /// Of handles that Pairs::is_handle() says may be ours.
  static void stop(void* handle) noexcept;
  static void record(void* handle, ncclProfilerEventState_t state,
                     ncclProfilerEventStateArgs_v4_t* arguments) noexcept;

  /// Ours, then theirs. No event of the communicator reaches theirs afterwards.
  static void finalize(void* context) noexcept;

 private:
  /// Counts a thread in; nothing of the link changes and theirs is not finalized under it.
  class Visit {
   public:
    explicit Visit(std::uint64_t context) noexcept : link_(place_of(context)) {
      if (link_ == nullptr) return;
      link_->inside_.fetch_add(1);
      if (link_->generation_.load() == generation_of(context)) return;
      link_->inside_.fetch_sub(1);
      link_ = nullptr;
    }
    ~Visit() {
      if (link_ != nullptr) link_->inside_.fetch_sub(1);
    }
    Visit(const Visit&) = delete;
    Visit& operator=(const Visit&) = delete;
    /// Null when it is gone.
    ProfilerLink* link() const noexcept { return link_; }

   private:
    ProfilerLink* link_;
  };

  // NCCL's context: bit 0 is set; 2-17 the link; 32-63 its generation, never 0.
  static std::uint32_t generation_of(std::uint64_t context) noexcept {
    return static_cast<std::uint32_t>(context >> 32);
  }

  ProfilerLink() = default;
  static ProfilerLink* take_free() noexcept;
  static void give_back(ProfilerLink* link) noexcept;
  static ProfilerLink* place_of(std::uint64_t context) noexcept;
  static bool is_gone(std::uint64_t context) noexcept;
  static bool is_of_this_process(int pid) noexcept;
  static const ProfilerLink* elsewhere(int abi_version) noexcept;
  static void open_elsewhere(const NextPlugin* next, SharedMask* mask,
                             ncclDebugLogger_t logger) noexcept;
  void open() noexcept;
  std::uint64_t bits() const noexcept;
  bool init_theirs(const ProfiledCommunicator& communicator, const char* name) noexcept;
  int mask_for(std::uint64_t type, const Pair* parent, const Pair* group,
               bool is_under_nothing) noexcept;
  void* start_both(ncclProfilerEventDescr_v5_t event) noexcept;
  void* start_theirs(ncclProfilerEventDescr_v5_t event, void* parent, void* group) noexcept;
  void keep_call_mask(std::uint64_t type, int mask) noexcept;
  void count_lost() noexcept;

  std::uint32_t index_ = 0;
  std::uint32_t last_generation_ = 0;  // under the table's mutex, as the next
  bool is_taken_ = false;
  std::atomic<std::uint32_t> generation_{0};  // 0: not open
  std::atomic<int> inside_{0};
  // Written before it opens; read by those inside.
  const NextPlugin* next_ = nullptr;
  SharedMask* mask_ = nullptr;
  Profiler* ours_ = nullptr;
  void* theirs_ = nullptr;
  bool has_theirs_ = false;
  bool is_elsewhere_ = false;  // for what our proxy does for another process's communicators
  ncclDebugLogger_t logger_ = nullptr;
  // What they wanted when the first call was made that has not been launched.
  std::atomic<int> call_mask_{0};
  std::atomic<bool> is_launched_{false};
  std::atomic<std::uint64_t> lost_{0};
};

}  // namespace dynamiccl
