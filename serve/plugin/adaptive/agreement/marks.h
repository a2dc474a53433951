// What NCCL's profiler tells about the stream of calls of one communicator, for its clock.
//
// getCollInfo alone cannot see what a question is about. Two things make the questions of one rank
// differ from the calls that all ranks make: calls captured in a CUDA graph are run again without
// being asked about, and ncclGroupSimulateEnd asks about calls that never run. From 2.28 on NCCL
// tells of both, on the thread that calls: CollApi says what is captured, and KernelLaunch comes
// once what was asked about is launched (v2.28.9-1 `src/enqueue.cc`, ncclLaunchKernel).
#pragma once

#include <atomic>
#include <cstdint>

namespace dynamiccl {

struct CallMarks {
  enum Bit : std::uint64_t {
    kCaptured = 1,  // the calls that are asked about now are captured
    kBegins = 2,    // what was asked about before has been launched: the next one begins a group
  };
  static constexpr std::uint64_t kBits = 2;

  /// Set by the profiler, on the thread that calls.
  void set_captured(bool is_captured) noexcept {
    const std::uint64_t before = bits.load(std::memory_order_relaxed);
    bits.store((before & ~std::uint64_t{kCaptured}) | (is_captured ? std::uint64_t{kCaptured} : 0),
               std::memory_order_relaxed);
    if (is_captured) captured.fetch_add(1, std::memory_order_relaxed);
  }
  /// A plan of that group was launched. One of another group, of sends and receives, is no sign
  /// that a collective which was asked about before runs: that one may have been simulated.
  void set_launched(const void* of_group) noexcept {
    if (of_group != group) return;
    bits.store(bits.load(std::memory_order_relaxed) | kBegins, std::memory_order_relaxed);
  }

  /// Whether NCCL tells. If not, every question is taken for the beginning of a group.
  void begin(bool is_told_of_launches) noexcept {
    bits.store(kBegins, std::memory_order_relaxed);
    captured.store(0, std::memory_order_relaxed);
    group = nullptr;
    kept = is_told_of_launches ? ~std::uint64_t{kBegins} : ~std::uint64_t{0};
  }

  /// A question has been answered. Returns the bits that it came with.
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
  std::atomic<std::uint64_t> captured{0};  // calls
  const void* group = nullptr;             // of the API, that the latest collective belongs to
};

}  // namespace dynamiccl
