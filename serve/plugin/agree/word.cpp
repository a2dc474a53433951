// Implementation of word.h.
#include "agree/word.h"

#include <cstdio>

namespace dynamiccl {
namespace {

// The word: 2 bits of state, 6 of why, 24 of the launcher's rank.
constexpr std::uint32_t kWhyShift = 2, kWhyMask = 0x3f, kRankShift = 8;
constexpr std::uint32_t kNoRank = 0xff'ffff;

/// 64 bits of all fields; never 0, which is a digest that nobody has set.
std::uint64_t digest_of(const Vote& vote) noexcept {
  std::uint64_t digest = 0xcbf29ce484222325U;
  for (const std::uint64_t field : vote.fields) {
    digest = (digest ^ field) * 0x9e3779b97f4a7c15U;
    digest ^= digest >> 32;
  }
  digest = (digest ^ vote.num_ranks) * 0x9e3779b97f4a7c15U;
  return digest != 0 ? digest : 1;
}

}  // namespace

WordVote::WordVote(const Vote* vote) noexcept
    : vote_(vote), step_(vote->problem[0] == '\0' ? Step::kDigest : Step::kDiffer) {}

void WordVote::decide(Board* board, WordState state, Why why) noexcept {
  std::uint32_t open = 0;
  const std::uint32_t rank =
      vote_->rank >= 0 ? static_cast<std::uint32_t>(vote_->rank) & kNoRank : kNoRank;
  const std::uint32_t word = static_cast<std::uint32_t>(state) |
                             static_cast<std::uint32_t>(why) << kWhyShift | rank << kRankShift;
  has_decided_ |= board->word.compare_exchange_strong(open, word);
}

void WordVote::take(Board* board, bool is_time_up) noexcept {
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
      auto why = static_cast<std::uint32_t>(Why::kDiffers);
      for (std::uint32_t i = 0; i < kNumFields; ++i) {
        const std::uint64_t first = board->fields[i];
        if (first == 0 || first == vote_->fields[i]) continue;
        why = static_cast<std::uint32_t>(Why::kFirstField) + i;
        break;
      }
      const bool has_problem = vote_->problem[0] != '\0';
      decide(board, WordState::kAbstain, has_problem ? Why::kProblem : static_cast<Why>(why));
      step_ = Step::kCount;
      break;
    }
    case Step::kCount:
      came_last_ = board->votes.fetch_add(1) + 1 == vote_->num_ranks;
      step_ = came_last_ ? Step::kDecide : Step::kWait;
      break;
    case Step::kDecide:
      decide(board, WordState::kTable, Why::kNothing);
      step_ = Step::kWait;
      break;
    case Step::kWait:
      if (is_time_up) decide(board, WordState::kAbstain, Why::kLate);
      word_ = board->word;
      if (state_of(word_) != WordState::kOpen) step_ = Step::kDone;
      break;
    case Step::kDone:
      break;
  }
}

bool WordVote::was_late() const noexcept {
  return static_cast<Why>(word_ >> kWhyShift & kWhyMask) == Why::kLate;
}

void WordVote::write_reason(char* text, std::size_t size) const noexcept {
  const auto why = static_cast<Why>(word_ >> kWhyShift & kWhyMask);
  const std::uint32_t rank = word_ >> kRankShift;
  char who[24] = "a rank";
  if (rank != kNoRank) std::snprintf(who, sizeof who, "rank %u", rank);
  switch (why) {
    case Why::kNothing:
      std::snprintf(text, size, "it has the table");
      break;
    case Why::kLate:
      std::snprintf(text, size, "not all %u ranks came in time", vote_->num_ranks);
      break;
    case Why::kProblem:
      std::snprintf(text, size, "%s cannot use a table: its own line says why", who);
      break;
    case Why::kDiffers:
      std::snprintf(text, size, "%s differs from the first", who);
      break;
    default: {
      const auto field =
          static_cast<std::uint32_t>(why) - static_cast<std::uint32_t>(Why::kFirstField);
      std::snprintf(text, size, "%s differs from the first in %s", who,
                    field < kNumFields ? kFieldNames[field] : "what another build knows");
    }
  }
}

}  // namespace dynamiccl
