// Sweep mode: play a schedule, call by call, inside one benchmark process.
//
// This is for benchmarks, whose calls are known beforehand, and never for a job. All ranks hold the
// same schedule and see the same calls, so counting them is enough to agree; should a call not be
// the one expected, every rank sees that at the same call, and every rank stops playing for good.
//
// Environment (read once per communicator, at its creation; DYNAMICCL_MODE is in exports.cpp):
//   DYNAMICCL_SCHEDULE       path of the schedule (dynamiccl/schedule.py writes it).
//   DYNAMICCL_SCHEDULE_HASH  its hash, 16 hexadecimal digits, from the launcher: with a stale copy,
//                            a node's ranks would play another schedule.
//   DYNAMICCL_SWEEP_REPORT   path of the report, which must not exist yet; the rank that creates
//                            it writes it. Default: none.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "choice.h"
#include "sweep/chunk.h"
#include "sweep/report.h"
#include "sweep/schedule.h"

namespace dynamiccl {

/// One communicator's way through a schedule. NCCL uses a communicator from one thread at a time.
/// Were it not so, nobody could count: a call that comes during another ends the playing.
class Player {
 public:
  Player() = default;
  ~Player() { report_.set_calls(calls_); }
  Player(const Player&) = delete;
  Player& operator=(const Player&) = delete;

  /// Load the schedule at `path` for a communicator. Null on success, else why it must not be
  /// played. `hash` is what the launcher says that the file's checksum is.
  const char* load(const char* path, const char* hash, std::size_t num_ranks,
                   std::size_t num_nodes) noexcept;

  /// Report to the file at `path`, unless another rank does. Null on success, else why not.
  /// What is played is on the file's server at most `sync_every_ns` after the block's first call.
  const char* report_to(const char* path, std::uint64_t sync_every_ns = 1'000'000'000) noexcept {
    sync_every_ns_ = sync_every_ns;
    return report_.create(path, schedule_.num_blocks, schedule_.checksum);
  }

  bool reports() const noexcept { return report_.is_open(); }
  const Schedule& schedule() const noexcept { return schedule_; }

  /// Count a getCollInfo and give it what its block is to run, or touch nothing.
  void answer(int collective, std::size_t size_bytes, CostTable costs, int* num_channels) noexcept;

  /// A getChunkSize: give the block's chunk size when the question surely is about its call.
  bool answer_chunk(int collective, int algorithm, int protocol, std::size_t* chunk_bytes) noexcept;

 private:
  /// One call's stay inside.
  class Stay {
   public:
    explicit Stay(Player* player) noexcept
        : inside_(player->inside_),
          is_alone_(inside_.fetch_add(1, std::memory_order_acquire) == 0) {}
    ~Stay() { inside_.fetch_sub(1, std::memory_order_release); }
    Stay(const Stay&) = delete;
    Stay& operator=(const Stay&) = delete;
    bool is_alone() const noexcept { return is_alone_; }

   private:
    std::atomic<std::uint32_t>& inside_;
    const bool is_alone_;
  };

  /// Never play again. The one function that may be called during another.
  void stop() noexcept { playing_.store(false, std::memory_order_relaxed); }
  bool begin_call() noexcept;
  bool begin_segment() noexcept;
  void stop_at(int collective, std::size_t size_bytes) noexcept;
  BlockState play(CostTable costs, int* num_channels) noexcept;
  void note(BlockState state) noexcept;

  Schedule schedule_;
  Report report_;
  std::uint64_t sync_every_ns_ = 0;
  std::atomic<bool> playing_{false};
  std::atomic<std::uint32_t> inside_{0};  // calls
  std::uint64_t calls_ = 0;

  // The warm-up run or block in which the next call is.
  std::uint64_t calls_left_ = 0;
  std::uint64_t expected_bytes_ = 0;
  std::int32_t warmup_run_ = 0;  // the next one
  std::int32_t block_ = -1;      // -1: in the warm-up
  std::int32_t size_ = 0;        // of block_, an index
  const Entry* config_ = nullptr;
  BlockState state_ = kNotReached;
  // The block before.
  std::uint64_t previous_bytes_ = 0;
  BlockState previous_state_ = kNotReached;

  ChunkTurn chunks_;
};

}  // namespace dynamiccl
