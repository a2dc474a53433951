// The agreement of ranks that are all on one host: one word of shared memory, and no process that
// could be lost. A state machine of single steps on atomics, so that the explorer can put any other
// rank's step between two of them; tuner/init.h takes them one after the other.
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

#include "agree/vote.h"

namespace dynamiccl {

enum class WordState : std::uint32_t { kOpen, kTable, kAbstain };

/// What lies in shared memory; all zero when it is made.
struct Board {
  /// 2 bits of state; why it is abstain, 6 bits; and the launcher's rank of whoever swapped it, 24.
  std::atomic<std::uint32_t> word;
  std::atomic<std::uint32_t> votes;
  std::atomic<std::uint64_t> digest;
  /// Of whoever set the digest, for messages; 0 for a moment.
  std::atomic<std::uint64_t> fields[kNumFields];
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "ranks are processes");

struct WordVote {
  enum class Step : std::uint8_t { kDigest, kDiffer, kCount, kDecide, kWait, kDone };
  enum Why : std::uint32_t { kLate = 1, kProblem = 2, kDiffers = 3, kFirstField = 4 };
  static constexpr std::uint32_t kNoRank = 0xff'ffff;

  /// `own` must outlive it; its fields are what must be equal on all ranks.
  explicit WordVote(const Vote* own) noexcept
      : vote(own), step(own->problem[0] != '\0' ? Step::kDiffer : Step::kDigest) {}

  static WordState state_of(std::uint32_t word) noexcept { return WordState{word & 3U}; }
  bool has_table() const noexcept { return state_of(word) == WordState::kTable; }
  /// Why there is no table.
  std::uint32_t why() const noexcept { return word >> 2 & 0x3f; }

  /// Takes the step. In kWait: `is_time_up` ends the wait.
  void take(Board* board, bool is_time_up) noexcept {
    switch (step) {
      case Step::kDigest: {
        std::uint64_t first = 0;
        // Of all fields; never 0, which nobody has set.
        const std::uint64_t own =
            siphash({vote->num_ranks, 0}, vote->fields, sizeof vote->fields) | 1;
        if (board->digest.compare_exchange_strong(first, own)) {
          for (std::size_t i = 0; i < kNumFields; ++i) board->fields[i] = vote->fields[i];
          first = own;
        }
        step = first == own ? Step::kCount : Step::kDiffer;
        break;
      }
      case Step::kDiffer: {
        std::uint32_t reason = vote->problem[0] != '\0' ? kProblem : kDiffers;
        for (std::uint32_t i = 0; i < kNumFields && reason == kDiffers; ++i) {
          const std::uint64_t first = board->fields[i];
          if (first != 0 && first != vote->fields[i]) reason = kFirstField + i;
        }
        decide(board, WordState::kAbstain, reason);
        step = Step::kCount;
        break;
      }
      case Step::kCount:
        came_last = board->votes.fetch_add(1) + 1 == vote->num_ranks;
        step = came_last ? Step::kDecide : Step::kWait;
        break;
      case Step::kDecide:
        decide(board, WordState::kTable, 0);
        step = Step::kWait;
        break;
      case Step::kWait:
        if (is_time_up) decide(board, WordState::kAbstain, kLate);
        word = board->word;
        if (state_of(word) != WordState::kOpen) step = Step::kDone;
        break;
      case Step::kDone:
        break;
    }
  }

  void decide(Board* board, WordState state, std::uint32_t reason) noexcept {
    std::uint32_t open = 0;
    const std::uint32_t rank = static_cast<std::uint32_t>(vote->rank) & kNoRank;
    const std::uint32_t decided = static_cast<std::uint32_t>(state) | reason << 2 | rank << 8;
    has_decided |= board->word.compare_exchange_strong(open, decided);
  }

  const Vote* vote;
  Step step;
  bool has_decided = false;  // for all: whoever waits for the word is to be woken
  bool came_last = false;    // the others have opened the word, and nobody comes late
  std::uint32_t word = 0;    // as it was read in the end
};

}  // namespace dynamiccl
