// Marks: what NCCL's profiler tells about the calls of one communicator, for its clock.
//
// getCollInfo alone cannot tell a question from a call that will run: calls captured in a CUDA
// graph are replayed without being asked about, and ncclGroupSimulateEnd asks about calls that
// never run. From 2.28 on NCCL's profiler tells of both, on the calling thread: CollApi says what
// is captured, and KernelLaunch comes once the calls are launched (v2.28.9-1 `src/enqueue.cc`,
// ncclLaunchKernel).
#pragma once

#include <atomic>
#include <cstdint>

namespace dynamiccl {

struct CallMarks {
  static constexpr std::uint64_t kCaptured = 1;  // the calls that are asked about now are captured
  /// What was asked about before has been launched: the next one begins a group.
  static constexpr std::uint64_t kBegins = 2;

  /// Whether NCCL's profiler tells. If not, every question counts as the beginning of a group.
  void begin(bool is_told_of_launches) noexcept {
    bits.store(kBegins, std::memory_order_relaxed);
    group = nullptr;
    kept = is_told_of_launches ? ~kBegins : ~std::uint64_t{0};
  }
  /// Set by the profiler, on the calling thread.
  void set_captured(bool is_captured) noexcept {
    const std::uint64_t others = bits.load(std::memory_order_relaxed) & ~kCaptured;
    bits.store(others | (is_captured ? kCaptured : 0), std::memory_order_relaxed);
  }
  /// A plan of that group was launched. A launch of another group (send and receive) does not show
  /// that a collective asked about earlier runs: it may have been simulated.
  void set_launched(const void* of_group) noexcept {
    if (of_group != group) return;
    bits.store(bits.load(std::memory_order_relaxed) | kBegins, std::memory_order_relaxed);
  }

  /// A question has been answered. Returns the marks that it came with.
  std::uint64_t pass() noexcept {
    const std::uint64_t before = bits.load(std::memory_order_relaxed);
    bits.store(before & kept, std::memory_order_relaxed);
    return before;
  }
  bool begins_group() const noexcept {
    return (bits.load(std::memory_order_relaxed) & kBegins) != 0;
  }

  std::atomic<std::uint64_t> bits{kBegins};
  std::uint64_t kept = ~std::uint64_t{0};
  const void* group = nullptr;  // of the API, that the latest collective belongs to
};

}  // namespace dynamiccl
