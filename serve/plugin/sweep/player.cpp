// Loading comes first; below it the hot path, which counts, compares and stores.
#include "sweep/player.h"

#include <strings.h>

#include <algorithm>
#include <cinttypes>
#include <cstdio>

namespace dynamiccl {
namespace {

bool has_hash(const Schedule& schedule, const char* hash) noexcept {
  char own[17];
  std::snprintf(own, sizeof own, "%016" PRIx64, schedule.checksum);
  return strcasecmp(own, hash) == 0;
}

}  // namespace

const char* Player::load(const char* path, const char* hash, std::size_t num_ranks,
                         std::size_t num_nodes) noexcept {
  if (const char* problem = load_schedule(path, &schedule_)) return problem;
  if (!has_hash(schedule_, hash)) return "its hash is not DYNAMICCL_SCHEDULE_HASH";
  if (static_cast<std::size_t>(schedule_.num_ranks) != num_ranks ||
      static_cast<std::size_t>(schedule_.num_nodes) != num_nodes) {
    return "it was made for another number of ranks or nodes";
  }
  size_ = schedule_.num_sizes - 1;  // the first block then begins with size 0
  playing_.store(true, std::memory_order_relaxed);
  return nullptr;
}

void Player::answer(int collective, std::size_t size_bytes, CostTable costs,
                    int* num_channels) noexcept {
  const Stay stay(this);
  if (!stay.is_alone()) return stop();
  ++calls_;
  chunks_.question();
  if (!playing_.load(std::memory_order_relaxed) || !begin_call()) return;
  if (size_bytes != expected_bytes_ || collective != schedule_.collective) {
    stop_at(collective, size_bytes);
    return;
  }
  // nccl-tests times neither the warm-up nor the first call of a half: see Report.
  const auto half = static_cast<std::uint64_t>(schedule_.calls_per_half);
  const bool untimed = block_ < 0 || calls_left_ == half || calls_left_ == 2 * half;
  --calls_left_;
  if (untimed) report_.set_calls(calls_);
  if (block_ >= 0) note(play(costs, num_channels));
  if (untimed) report_.sync(sync_every_ns_);
}

/// Find the warm-up run or block of a call; false when it comes after the last one.
bool Player::begin_call() noexcept { return calls_left_ != 0 || begin_segment(); }

bool Player::begin_segment() noexcept {
  if (warmup_run_ < schedule_.num_warmup_runs) {
    const WarmupRun& run = schedule_.warmup[warmup_run_++];
    expected_bytes_ = run.size_bytes;
    calls_left_ = run.num_calls;
    return true;
  }
  if (block_ + 1 == schedule_.num_blocks) return false;
  previous_bytes_ = expected_bytes_;
  previous_state_ = state_;
  ++block_;
  size_ = size_ + 1 == schedule_.num_sizes ? 0 : size_ + 1;
  expected_bytes_ = schedule_.sizes[size_];
  calls_left_ = static_cast<std::uint64_t>(schedule_.calls_per_half) *
                static_cast<std::uint64_t>(schedule_.halves);
  config_ = &schedule_.configs[schedule_.blocks[block_]];
  state_ = kNotReached;
  return true;
}

/// Not the call that was expected: what is being measured is not what the schedule says.
void Player::stop_at(int collective, std::size_t size_bytes) noexcept {
  stop();
  report_.set_stop(calls_, expected_bytes_, size_bytes, collective);
  if (state_ == kPlayed) {
    report_.set_state(block_, kMixed);
  } else if (state_ == kNotReached && previous_state_ == kPlayed && size_bytes == previous_bytes_) {
    report_.set_state(block_ - 1, kMixed);  // it has more calls than it should have
  }
}

BlockState Player::play(CostTable costs, int* num_channels) noexcept {
  if (config_->act == 0) return kAbstained;
  const int cell =
      is_sound(costs) ? choose(*config_, schedule_.num_nodes, costs, num_channels) : -1;
  if (cell < 0) return kUnavailable;
  chunks_.answered(schedule_.collective, cell, config_->chunk_bytes);
  return kPlayed;
}

void Player::note(BlockState state) noexcept {
  const BlockState now = state_ == kNotReached || state_ == state ? state : kMixed;
  if (now == state_) return;
  state_ = now;
  report_.set_state(block_, now);
}

bool Player::answer_chunk(int collective, int algorithm, int protocol,
                          std::size_t* chunk_bytes) noexcept {
  const Stay stay(this);
  if (!stay.is_alone()) {
    stop();
    return false;
  }
  if (!chunks_.answer(collective, algorithm, protocol, chunk_bytes)) return false;
  report_.set_chunk(block_, static_cast<std::uint32_t>(*chunk_bytes));
  return true;
}

}  // namespace dynamiccl
