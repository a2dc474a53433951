// Pool of collectives that wait for the GPU times of their channels.
#pragma once

#include <atomic>
#include <cstdint>

#include "profiler/record.h"

namespace dynamiccl {

/// A fixed pool of slots. A collective's slot lives until the collective has ended and all its
/// channels are done, then its record is pushed; or until a newer one needs the place, then it is
/// pushed without times. Channels are reported by NCCL's proxy thread, late, twice or never: a
/// ticket names the generation of its slot, and what comes with an old ticket is nobody's.
///
/// `state` of a slot holds all that must change together:
///   bits 0-7    channels still to end
///   bits 8-23   threads inside the slot, which keep it from being taken
///   bit 24      the collective has ended
///   bit 25      in use
///   bit 26      claimed by the one thread that publishes or fills it
///   bits 32-63  generation
/// Zeros are a free slot.
class Pending {
 public:
  static constexpr int kSlots = 256;
  static constexpr int kMaxChannels = 64;

  struct Ticket {
    std::uint32_t generation;
    std::uint8_t slot;
  };

  Pending() = default;
  Pending(const Pending&) = delete;
  Pending& operator=(const Pending&) = delete;

  /// The slots, once and for the life of the process; false when memory is short.
  bool allocate() noexcept;

  /// Keep `record`, of which `num_channels` (1 .. 64) channels will be reported, or as many as
  /// come. False when every slot is busy.
  bool begin(const CallRecord& record, Ticket* ticket) noexcept;

  /// The collective itself has been reported in full.
  void end(Ticket ticket) noexcept;

  void channel_begin(Ticket ticket, int channel, std::uint64_t gpu_ns) noexcept;
  void channel_stamp(Ticket ticket, int channel, std::uint64_t gpu_ns) noexcept;
  void channel_end(Ticket ticket, int channel) noexcept;

  /// Push what is still waiting, without times.
  void flush() noexcept;

 private:
  struct Slot {
    std::atomic<std::uint64_t> state;
    // One bit a channel: began, was stamped at its end, ended.
    std::atomic<std::uint64_t> began, stamped, ended;
    std::atomic<std::uint64_t> start_ns, stop_ns;
    CallRecord record;
  };

  static constexpr std::uint64_t kInsideOne = 1U << 8;
  static constexpr std::uint64_t kChannels = 0xff;
  static constexpr std::uint64_t kInside = 0xffff00;
  static constexpr std::uint64_t kEnded = 1U << 24;
  static constexpr std::uint64_t kUsed = 1U << 25;
  static constexpr std::uint64_t kClaimed = 1U << 26;
  static constexpr unsigned kGenerationShift = 32;

  /// The slot, held; null when the ticket is an old one.
  Slot* enter(Ticket ticket) noexcept;
  /// Lets go; `channels` and `ended` are what this thread has seen done.
  static void leave(Slot* slot, std::uint64_t channels, std::uint64_t ended) noexcept;
  /// Takes a slot for oneself alone if nobody is inside.
  static bool claim(Slot* slot, std::uint64_t* state) noexcept;
  static void publish(Slot* slot) noexcept;

  std::atomic<std::uint32_t> next_{0};
  Slot* slots_ = nullptr;
};

}  // namespace dynamiccl
