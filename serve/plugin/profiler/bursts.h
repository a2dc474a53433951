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

#include "vocabulary.h"

namespace dynamiccl {

inline constexpr std::uint64_t kBurstCalls = 16;

/// Parts per million of a text such as "1", "0.25" or "100"; -1 when it is not from 0 to 100.
int sample_ppm_of(const char* percent) noexcept;

/// Every how many bursts' worth of calls there is a burst; 0: never.
std::uint64_t burst_period(std::uint32_t sample_ppm) noexcept;

/// Whether a call's GPU time is to be taken. The first burst's worth of calls is a job's warm-up.
bool in_burst(std::uint64_t sequence, std::uint64_t period) noexcept;

/// The event mask of one NCCL in this process, shared by all its communicators.
///
/// Each may hold the mask wide; it is narrow when the last one lets go. All together must stay
/// within a budget, so that one whose burst never ends (it makes no more calls) costs no more than
/// it may.
class EventMask {
 public:
  /// The one for NCCL's int; null when a process has more NCCLs than anybody has seen.
  static EventMask* of(int* mask) noexcept;

  /// Ask for collectives, and launches where there are such events. Other bits are left as they
  /// are: they may belong to a burst.
  void begin(bool has_launches) noexcept;

  bool is_wide() const noexcept;

  /// Hold it wide. Returns the epoch to let go with; 0 when that would be beyond the budget.
  std::uint32_t hold(std::uint32_t sample_ppm) noexcept;
  void let_go(std::uint32_t epoch) noexcept;
  /// Whether what was held in that epoch still is.
  bool is_held(std::uint32_t epoch) const noexcept;
  /// Make everybody let go.
  void narrow() noexcept;

  /// A collective came by.
  void count(bool is_sampled, std::uint32_t sample_ppm) noexcept;

 private:
  // Bits 0-31: how many hold it. Bits 32-63: the epoch, never 0.
  static constexpr std::uint64_t kFirstEpoch = std::uint64_t{1} << 32;

  bool within_budget(std::uint64_t more, std::uint32_t sample_ppm) const noexcept;
  void apply() noexcept;

  std::atomic<int*> mask_{nullptr};
  std::atomic<std::uint64_t> held_{kFirstEpoch};
  std::atomic<std::uint64_t> calls_{0};
  std::atomic<std::uint64_t> sampled_{0};
};

/// The bursts of one collective of one communicator.
class Bursts {
 public:
  /// A call's event has started: widen the mask before a burst, narrow it after one.
  /// `is_sampled`: the mask was wide when the call was made.
  void step(EventMask* mask, std::uint64_t sequence, std::uint64_t period, std::uint32_t sample_ppm,
            bool is_sampled) noexcept;

  /// A replay of a captured call: these do not move the sequence number, so they begin no burst.
  void end(EventMask* mask) noexcept;

 private:
  // How many calls a burst may wait for one that was made after it began: those of one group are
  // all made before the first of their events.
  static constexpr std::uint64_t kPatience = 256;

  std::atomic<std::uint32_t> epoch_{0};  // 0: not holding
  std::atomic<std::uint64_t> until_{0};
};

}  // namespace dynamiccl
