// Handles for NCCL that stand for two: ours and that of a vendor's profiler.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace dynamiccl {

/// What one of NCCL's handles of an event stands for.
struct Pair {
  void* ours;  // may be null, as may theirs
  void* theirs;
  std::uint64_t link;  // NCCL's context of the communicator
  int mask;            // what they wanted when the call was made that the event belongs to
  bool is_orphan;      // they gave no handle to the event above
};

/// How long a pair is needed. Each has places of its own, so that the many brief events do not push
/// out the calls that they belong to.
enum class PairLife : unsigned {
  call,      // GroupApi, CollApi, P2pApi: until the launch, after their stop
  captured,  // the same of a call that is captured: as long as the graph is replayed
  task,      // Group, Coll, P2p: until the kernels have been reported, after their stop
  brief,     // all others: until their stop
};

/// Places for pairs, used again oldest first; the process's own, and never freed. A handle has
/// zeros in its low two bits, which no handle of ours has, then the place, then the number of its
/// turn there. Late or twice, it names a turn that is over.
class Pairs {
 public:
  static constexpr std::size_t kPlaces = 1 << 14;  // of each life

  /// Memory for them, once; false when it is short.
  static bool allocate() noexcept;

  /// Whether what NCCL holds may be one of ours: a hint without reading memory.
  static bool is_handle(void* handle) noexcept {
    return handle != nullptr && (reinterpret_cast<std::uintptr_t>(handle) & 3) == 0;
  }

  /// A place for an event that is about to start; null when all that were tried hold events which
  /// have not stopped. `is_gone` says of a link that its events will not stop any more.
  static void* reserve(PairLife life, bool (*is_gone)(std::uint64_t link)) noexcept;

  /// After `reserve`: the event has started, or it needs no place.
  static void fill(void* handle, const Pair& pair) noexcept;
  static void cancel(void* handle) noexcept;

  /// False when there is no such pair, or no longer.
  static bool find(void* handle, Pair* pair) noexcept;

  /// The event has stopped: its place may be used again.
  static void close(void* handle) noexcept;
};

}  // namespace dynamiccl
