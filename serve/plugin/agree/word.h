// The agreement of ranks that are all on one host: one word of shared memory, and no process that
// could be lost. A state machine of single steps on atomics, so that the explorer can put any other
// rank's step between two of them; `agree_by_word` (word_file.h) takes them one after the other.
//
//   kDigest   the first digest is set by compare-and-swap
//   kDiffer   who finds another one there, or has a problem, swaps open -> abstain before it counts
//   kCount    one vote more
//   kDecide   the last of all swaps open -> table
//   kWait     until it is decided; whose time is up swaps open -> abstain
//   kDone     everybody has read the word
//
// Sound for ids that are unique in the job: identity/ids.h says so before any rank gets here.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "agree/vote.h"

namespace dynamiccl {

enum class WordState : std::uint32_t { kOpen, kTable, kAbstain };

/// What lies in shared memory; all zero when it is made.
struct Board {
  /// A state, and why it is abstain: kind and rank of whoever swapped it.
  std::atomic<std::uint32_t> word;
  std::atomic<std::uint32_t> votes;
  std::atomic<std::uint64_t> digest;
  /// Of whoever set the digest, for messages; 0 for a moment.
  std::atomic<std::uint64_t> fields[kNumFields];
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "ranks are processes");

class WordVote {
 public:
  enum class Step : std::uint8_t { kDigest, kDiffer, kCount, kDecide, kWait, kDone };

  /// `vote` must outlive it; its fields are what must be equal on all ranks.
  explicit WordVote(const Vote* vote) noexcept;

  Step step() const noexcept { return step_; }
  /// Whether this rank has decided for all; whoever waits for the word is to be woken.
  bool has_decided() const noexcept { return has_decided_; }
  /// Whether it was the last of all to vote: the others have opened the word, and nobody comes
  /// late.
  bool came_last() const noexcept { return came_last_; }
  bool has_table() const noexcept { return state_of(word_) == WordState::kTable; }
  /// Whether it was decided by somebody whose time was up.
  bool was_late() const noexcept;
  /// Why there is no table, zero-terminated.
  void write_reason(char* text, std::size_t size) const noexcept;

  /// Takes the step. In kWait: `is_time_up` ends the wait.
  void take(Board* board, bool is_time_up) noexcept;

  static WordState state_of(std::uint32_t word) noexcept {
    return static_cast<WordState>(word & 3U);
  }

 private:
  enum class Why : std::uint32_t { kNothing, kLate, kProblem, kDiffers, kFirstField };

  void decide(Board* board, WordState state, Why why) noexcept;

  const Vote* vote_;
  Step step_;
  bool has_decided_ = false;
  bool came_last_ = false;
  std::uint32_t word_ = 0;  // as it was read in the end
};

}  // namespace dynamiccl
