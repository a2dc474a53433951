// Compares what the ranks would run, call by call, while the job plays.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tests/job/board.h"
#include "tests/job/plan.h"

/// What one rank would run at the call in question.
struct Answer {
  int rank;
  Record record;
};

struct Disagreement {
  int slot;
  std::vector<Answer> answers;
};

/// One communicator slot as one group of ranks sees it, through all its generations.
struct CommunicatorSummary {
  int slot;
  std::vector<int> members;
  std::uint64_t calls = 0, acted = 0, replayed = 0, disagreements = 0;
  std::uint64_t acted_unevenly = 0;  // some ranks' plugins wrote something and some did not
  std::uint64_t switches = 0;        // changes of the answer to one and the same question
  std::uint32_t generations = 0, generations_acted = 0;
  std::optional<std::uint64_t> first_acted, last_acted;  // calls of their generation
};

class Checker {
 public:
  Checker(const Options& options, const Plan& plan, Board& board);

  /// Reads what is new; false when there was nothing.
  bool advance();

  const std::vector<CommunicatorSummary>& communicators() const { return summaries_; }
  const std::optional<Disagreement>& first_disagreement() const { return first_; }

 private:
  struct Progress {
    std::uint64_t next = 0;  // index of the record to compare
    std::uint32_t generation = 0;
    bool generation_acted = false;
    std::uint32_t epoch = 0;
    std::map<std::uint32_t, std::pair<std::uint64_t, std::uint32_t>> known;  // answer and epoch
  };

  bool read(std::size_t index, std::vector<Answer>* answers);
  void compare(std::size_t index, const std::vector<Answer>& answers);
  void follow(std::size_t index, const Record& record);

  Board& board_;
  std::vector<CommunicatorSummary> summaries_;
  std::vector<Progress> progress_;
  std::optional<Disagreement> first_;
};

struct RankEnd {
  bool exited = false;
  int exit_code = 0;
  int signal = 0;
  bool expected = true;  // of its own accord with 0, or killed because the job said so
};

struct JobEnd {
  double wall_s = 0;
  bool hit_deadline = false;
  std::vector<RankEnd> ranks;
  std::vector<std::string> logs;  // of each rank, as it wrote them
};

/// One JSON document of what the job came to.
std::string to_json(const Options& options, const Checker& checker, const Board& board,
                    const JobEnd& end);
