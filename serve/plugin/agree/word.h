// The agreement of ranks that are all on one host: one word of shared memory, and no process that
// could be lost. A state machine of single steps on atomics, so that the explorer can put any other
// rank's step between two of them; `agree_by_word` takes them one
// after the other.
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
#include <cstdio>

#include "agree/seal.h"

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

class WordVote {
 public:
  enum class Step : std::uint8_t { kDigest, kDiffer, kCount, kDecide, kWait, kDone };

  /// `vote` must outlive it; its fields are what must be equal on all ranks.
  explicit WordVote(const Vote* vote) noexcept
      : vote_(vote), step_(has_problem() ? Step::kDiffer : Step::kDigest) {}

  Step step() const noexcept { return step_; }
  bool has_problem() const noexcept { return vote_->problem[0] != '\0'; }
  /// Whether this rank has decided for all; whoever waits for the word is to be woken.
  bool has_decided() const noexcept { return has_decided_; }
  /// Whether it was the last of all to vote: the others have opened the word, and nobody comes
  /// late.
  bool came_last() const noexcept { return came_last_; }
  bool has_table() const noexcept { return state_of(word_) == WordState::kTable; }
  /// Whether it was decided by somebody whose time was up.
  bool was_late() const noexcept { return why() == kLate; }

  /// Why there is no table, zero-terminated.
  void write_reason(char* text, std::size_t size) const noexcept {
    const std::uint32_t rank = word_ >> kRankShift, field = why() - kFirstField;
    char who[24] = "a rank";
    if (rank != kNoRank) std::snprintf(who, sizeof who, "rank %u", rank);
    if (why() == kLate) {
      std::snprintf(text, size, "not all %u ranks came in time", vote_->num_ranks);
    } else if (why() == kProblem) {
      std::snprintf(text, size, "%s cannot use a table: its own line says why", who);
    } else {
      std::snprintf(text, size, "%s differs from the first%s%s", who,
                    field < kNumFields ? " in " : "", field < kNumFields ? kFieldNames[field] : "");
    }
  }

  /// Takes the step. In kWait: `is_time_up` ends the wait.
  void take(Board* board, bool is_time_up) noexcept {
    switch (step_) {
      case Step::kDigest: {
        std::uint64_t first = 0;
        const std::uint64_t own = digest_of(*vote_);
        if (board->digest.compare_exchange_strong(first, own)) {
          for (std::size_t i = 0; i < kNumFields; ++i) board->fields[i] = vote_->fields[i];
          first = own;
        }
        step_ = first == own ? Step::kCount : Step::kDiffer;
        break;
      }
      case Step::kDiffer: {
        std::uint32_t why = has_problem() ? kProblem : kDiffers;
        for (std::uint32_t i = 0; i < kNumFields && why == kDiffers; ++i) {
          const std::uint64_t first = board->fields[i];
          if (first != 0 && first != vote_->fields[i]) why = kFirstField + i;
        }
        decide(board, WordState::kAbstain, why);
        step_ = Step::kCount;
        break;
      }
      case Step::kCount:
        came_last_ = board->votes.fetch_add(1) + 1 == vote_->num_ranks;
        step_ = came_last_ ? Step::kDecide : Step::kWait;
        break;
      case Step::kDecide:
        decide(board, WordState::kTable, 0);
        step_ = Step::kWait;
        break;
      case Step::kWait:
        if (is_time_up) decide(board, WordState::kAbstain, kLate);
        word_ = board->word;
        if (state_of(word_) != WordState::kOpen) step_ = Step::kDone;
        break;
      case Step::kDone:
        break;
    }
  }

  static WordState state_of(std::uint32_t word) noexcept {
    return static_cast<WordState>(word & 3U);
  }

 private:
  static constexpr std::uint32_t kWhyShift = 2, kRankShift = 8, kNoRank = 0xff'ffff;
  static constexpr std::uint32_t kLate = 1, kProblem = 2, kDiffers = 3, kFirstField = 4;  // why

  /// Of all fields; never 0, which is a digest that nobody has set.
  static std::uint64_t digest_of(const Vote& vote) noexcept {
    return siphash({vote.num_ranks, 0}, vote.fields, sizeof vote.fields) | 1;
  }

  std::uint32_t why() const noexcept { return word_ >> kWhyShift & 0x3f; }

  void decide(Board* board, WordState state, std::uint32_t why) noexcept {
    std::uint32_t open = 0;
    const std::uint32_t rank = static_cast<std::uint32_t>(vote_->rank) & kNoRank;
    const std::uint32_t word =
        static_cast<std::uint32_t>(state) | why << kWhyShift | rank << kRankShift;
    has_decided_ |= board->word.compare_exchange_strong(open, word);
  }

  const Vote* vote_;
  Step step_;
  bool has_decided_ = false;
  bool came_last_ = false;
  std::uint32_t word_ = 0;  // as it was read in the end
};

/// Agrees with the other ranks of `vote.round`, all of which are on this host, by a word in
/// /dev/shm that is named by user, job and communicator; at most `limit_ms`. Whether they all use
/// the table. If not, `reason` says why, zero-terminated. `waited_in_vain`: whether somebody did
/// not come at all.
///
/// A rank that cannot open the file never votes, so nobody has the table. Whoever comes last
/// removes the name, since all have opened it. Where one does not come it stays, should that one
/// come late, and the next dynamiccl-run of the user sweeps it.
bool agree_by_word(const Vote& vote, std::uint64_t limit_ms, bool* waited_in_vain, char* reason,
                   std::size_t reason_size) noexcept;

}  // namespace dynamiccl
