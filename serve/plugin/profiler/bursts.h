// When GPU times are taken: NCCL's event mask is widened for short bursts of calls.
//
// Taking them is not free. While KernelCh is in the mask, every collective that is called gets
// proxy operations, and a plan that is captured in a CUDA graph then carries a host function that
// runs at every replay for as long as the graph lives (`src/enqueue.cc`). So the mask is wide for
// few calls, and not at all as soon as a capture shows itself. A capture should find it off: the
// first calls of a communicator are never sampled (but with 100 %), and docs tell to capture early
// or to set DYNAMICCL_SAMPLE_PERCENT=0.
//
// Which calls are sampled follows from NCCL's own sequence number, so that all ranks take the times
// of the same calls. NCCL reads the mask when a call is made, and starts the event of a collective
// when its plan is launched: the mask is switched by the event before.
#pragma once

#include <atomic>
#include <cstdint>

namespace dynamiccl {

inline constexpr std::uint64_t kBurstCalls = 16;

/// Parts per million of a text such as "1", "0.25" or "100"; -1 when it is not from 0 to 100.
int sample_ppm_of(const char* percent) noexcept;

/// Whether a call's GPU time is to be taken. The first burst's worth of calls is a job's warm-up.
bool in_burst(std::uint64_t sequence, std::uint32_t sample_ppm) noexcept;

/// The event mask of one NCCL in this process, shared by all its communicators.
///
/// Whoever is in a burst keeps it wide, and says so at each call; the last one that said so ends
/// it. All together stay within the share of calls and an allowance, so that a burst that never
/// ends (its communicator makes no more calls) costs no more than that. When threads race for it,
/// a call more or less is sampled, and the next call puts it right.
class EventMask {
 public:
  /// The one for NCCL's int; null when a process has more NCCLs than anybody has seen.
  static EventMask* of(int* mask) noexcept;

  /// Ask for collectives, and launches where there are such events. Other bits are left as they
  /// are: they may belong to a burst.
  void begin(bool has_launches) noexcept;

  bool is_wide() const noexcept;

  /// For a burst of `owner`; not beyond the budget.
  void widen(const void* owner, std::uint32_t sample_ppm) noexcept;
  /// The burst of `owner` has ended: nothing if somebody else has kept it wide since.
  void let_go(const void* owner) noexcept;
  void narrow() noexcept;

  /// A collective came by.
  void count(bool is_sampled, std::uint32_t sample_ppm) noexcept;

 private:
  bool within_budget(std::uint64_t more, std::uint32_t sample_ppm) const noexcept;

  std::atomic<int*> mask_{nullptr};
  std::atomic<const void*> owner_{nullptr};
  std::atomic<std::uint64_t> calls_{0};
  std::atomic<std::uint64_t> sampled_{0};
};

}  // namespace dynamiccl
