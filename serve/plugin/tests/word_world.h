// A small world for the word of `agree/word.h`: ranks of one host, the files that they open, and
// what happens to them. Every atomic step of a rank is a choice of its own.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "agree/word.h"
#include "identity/ids.h"
#include "tests/agree_world.h"

namespace dynamiccl {

struct WordSetup {
  const char* name;
  int num_ranks = 2;
  int kills = 0;
  int failed_opens = 0;  // no descriptor, a full tmpfs, another /dev/shm
  int timeouts = 8;      // of ranks that wait
  int differs = -1;
  int never_comes = -1;
  bool shrinks = false;  // two disjoint shrinks of one parent, which have one name
};

inline constexpr WordSetup kWordSetups[] = {
    {"three ranks", 3, 1, 1},
    {"three, one differs", 3, 1, 0, 8, 1},
    {"three, one never comes", 3, 0, 0, 8, -1, 2},
    {"four ranks", 4, 1, 0},
    {"four, two fail to open", 4, 0, 2},
    {"nobody is out of time", 3, 0, 0, 0},
    {"two disjoint shrinks", 2, 0, 0, 8, -1, -1, true},
};

struct WordAction {
  enum What : std::uint8_t { kOpen, kOpenFails, kStep, kTimeIsUp, kKill } what;
  std::uint8_t which;
  std::uint8_t how = 0;
};

class WordWorld {
 public:
  explicit WordWorld(const WordSetup& setup)
      : setup_(&setup),
        kills_(setup.kills),
        failed_opens_(setup.failed_opens),
        timeouts_(setup.timeouts) {
    const int comms = setup.shrinks ? 2 : 1;
    for (int i = 0; i < comms * setup.num_ranks; ++i) {
      const int number = i % setup.num_ranks;
      Ids ids;  // of this process, which was a member of the parent
      ids.note(kComm);
      const bool may_repeat = setup.shrinks && ids.note(id_of_shrunk(kComm));
      Vote vote;
      vote.num_ranks = static_cast<std::uint32_t>(setup.num_ranks);
      vote.rank = i;
      vote.fields[2] = number == setup.differs ? 2 : 1;
      if (may_repeat) std::snprintf(vote.problem, sizeof vote.problem, "its id is not unique");
      votes_->push_back(vote);
    }
    for (int i = 0; i < comms * setup.num_ranks; ++i) {
      ranks_.push_back({WordVote(&(*votes_)[static_cast<std::size_t>(i)]), i % setup.num_ranks});
    }
  }

  static const char* name_of(const WordAction& action) {
    static constexpr const char* kNames[] = {"open", "open fails", "step", "time is up", "kill"};
    return kNames[action.what];
  }

  std::vector<WordAction> actions() const {
    std::vector<WordAction> found;
    for (std::size_t i = 0; i < ranks_.size(); ++i) {
      const Rank& rank = ranks_[i];
      const auto which = static_cast<std::uint8_t>(i);
      if (rank.dead || rank.failed || rank.number == setup_->never_comes) continue;
      if (rank.board < 0) {
        found.push_back({WordAction::kOpen, which});
        if (failed_opens_ > 0) found.push_back({WordAction::kOpenFails, which});
      } else if (rank.vote.step != WordVote::Step::kDone) {
        const Word& word = words_[static_cast<std::size_t>(rank.board)];
        const bool waits = rank.vote.step == WordVote::Step::kWait && word.word == 0;
        if (!waits) found.push_back({WordAction::kStep, which});
        if (waits && timeouts_ > 0) found.push_back({WordAction::kTimeIsUp, which});
      } else {
        continue;
      }
      if (kills_ > 0) found.push_back({WordAction::kKill, which});
    }
    return found;
  }

  void act(const WordAction& action) {
    path.push_back(action);
    Rank& rank = ranks_[action.which];
    switch (action.what) {
      case WordAction::kOpen:
        if (path_ < 0) {
          path_ = static_cast<int>(words_.size());
          words_.push_back({});
        }
        rank.board = path_;
        break;
      case WordAction::kOpenFails:
        --failed_opens_;
        rank.failed = true;
        break;
      case WordAction::kTimeIsUp:
        --timeouts_;
        step(&rank, true);
        break;
      case WordAction::kStep:
        step(&rank, false);
        break;
      case WordAction::kKill:
        --kills_;
        rank.dead = true;
        break;
    }
  }

  const char* wrong() const {
    for (std::size_t i = 0; i < ranks_.size(); ++i) {
      for (std::size_t j = 0; j < ranks_.size(); ++j) {
        const bool is_same =
            static_cast<int>(i) / setup_->num_ranks == static_cast<int>(j) / setup_->num_ranks;
        if (is_same && has_table(ranks_[i]) && abstains(ranks_[j])) return "table beside abstain";
        if (is_same && has_table(ranks_[i]) && setup_->differs >= 0)
          return "a table, and one differs";
      }
    }
    return nullptr;
  }

  const char* wrong_at_end() const {
    const bool can_abstain = setup_->kills + setup_->failed_opens + setup_->timeouts > 0 ||
                             setup_->differs >= 0 || setup_->never_comes >= 0 || setup_->shrinks;
    for (const Rank& rank : ranks_) {
      if (rank.dead || rank.failed || rank.number == setup_->never_comes) continue;
      if (rank.vote.step != WordVote::Step::kDone && timeouts_ > 0) return "it hangs";
      if (!can_abstain && !has_table(rank)) return "nothing went wrong, and it has no table";
    }
    return nullptr;
  }

  std::string state() const {
    std::string out;
    for (const Rank& rank : ranks_) {
      out += {static_cast<char>(rank.vote.step), static_cast<char>(rank.board + 1),
              static_cast<char>(rank.dead + 2 * rank.failed + 4 * rank.vote.has_table() +
                                8 * rank.vote.came_last)};
    }
    for (const Word& word : words_) {
      out += {static_cast<char>(WordVote::state_of(word.word)), static_cast<char>(word.votes),
              static_cast<char>(word.digest)};
    }
    out += {static_cast<char>(path_ + 1), static_cast<char>(kills_),
            static_cast<char>(failed_opens_), static_cast<char>(timeouts_)};
    return out;
  }

  std::vector<WordAction> path;

 private:
  struct Rank {
    WordVote vote;
    int number;
    int board = -1;
    bool dead = false;
    bool failed = false;
  };
  struct Word {
    std::uint32_t word = 0, votes = 0;
    std::uint64_t digest = 0;
    std::uint64_t fields[kNumFields] = {};
  };

  static bool has_table(const Rank& rank) {
    return rank.vote.step == WordVote::Step::kDone && rank.vote.has_table();
  }
  static bool abstains(const Rank& rank) {
    const bool is_done = rank.vote.step == WordVote::Step::kDone;
    return rank.failed || (is_done && !rank.vote.has_table());
  }

  void step(Rank* rank, bool is_time_up) {
    Word& word = words_[static_cast<std::size_t>(rank->board)];
    Board board = {};
    board.word = word.word;
    board.votes = word.votes;
    board.digest = word.digest;
    for (std::size_t i = 0; i < kNumFields; ++i) board.fields[i] = word.fields[i];
    rank->vote.take(&board, is_time_up);
    word.word = board.word;
    word.votes = board.votes;
    word.digest = board.digest;
    for (std::size_t i = 0; i < kNumFields; ++i) word.fields[i] = board.fields[i];
    // Whoever comes last takes the name away, whatever lies under it by then.
    if (rank->vote.step == WordVote::Step::kDone && rank->vote.came_last) path_ = -1;
  }

  const WordSetup* setup_;
  std::shared_ptr<std::vector<Vote>> votes_ = std::make_shared<std::vector<Vote>>();
  int kills_, failed_opens_, timeouts_;
  int path_ = -1;  // the file of that name
  std::vector<Word> words_;
  std::vector<Rank> ranks_;
};

}  // namespace dynamiccl
