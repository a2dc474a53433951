// Compares the ranks' records of a call once every rank that is still alive has written its own.
#include "tests/job/checker.h"

#include <algorithm>

namespace {

/// Whether two ranks would run the same kernel; ignores whether it is a replay, and who chose it.
bool same(const Record& left, const Record& right) {
  return left.call == right.call && left.generation == right.generation &&
         left.collective == right.collective && left.size_bytes == right.size_bytes &&
         left.algorithm == right.algorithm && left.protocol == right.protocol &&
         left.num_channels == right.num_channels;
}

std::uint64_t answer_of(const Record& record) {
  return static_cast<std::uint64_t>(record.num_channels << 16 | record.algorithm << 8 |
                                    record.protocol);
}

}  // namespace

Checker::Checker(const Options& options, const Plan& plan, Board& board) : board_(board) {
  for (int slot = 0; slot < options.num_slots; ++slot) {
    for (int rank = 0; rank < options.num_ranks; ++rank) {
      const std::vector<int> members = plan.members(slot, rank);
      if (members.front() != rank) continue;
      CommunicatorSummary summary = {};
      summary.slot = slot;
      summary.members = members;
      summary.generations = 1;
      summaries_.push_back(summary);
    }
  }
  progress_.resize(summaries_.size());
}

bool Checker::advance() {
  bool any = false;
  std::vector<Answer> answers;
  for (std::size_t index = 0; index < summaries_.size(); ++index) {
    for (int i = 0; i < kRingRecords && read(index, &answers); ++i) {
      compare(index, answers);
      any = true;
    }
  }
  return any;
}

bool Checker::read(std::size_t index, std::vector<Answer>* answers) {
  const CommunicatorSummary& summary = summaries_[index];
  const std::uint64_t next = progress_[index].next;
  answers->clear();
  for (const int rank : summary.members) {
    Lane& lane = board_.lane(summary.slot, rank);
    const bool is_gone = lane.gone || board_.ranks[rank].dead;  // before looking for its record
    if (lane.issued > next) {
      answers->push_back({rank, lane.ring[next % kRingRecords]});
    } else if (!is_gone) {
      return false;
    }
  }
  if (answers->empty()) return false;
  ++progress_[index].next;
  for (const int rank : summary.members) {
    Lane& lane = board_.lane(summary.slot, rank);
    if (lane.issued > next) lane.checked = next + 1;
  }
  return true;
}

void Checker::compare(std::size_t index, const std::vector<Answer>& answers) {
  CommunicatorSummary& summary = summaries_[index];
  const Record& first = answers.front().record;
  const auto differs = [&](const Answer& answer) { return !same(first, answer.record); };
  const auto acted = [](const Answer& answer) { return answer.record.acted; };
  const auto replayed = [](const Answer& answer) { return answer.record.replayed; };
  const bool all_acted = std::all_of(answers.begin(), answers.end(), acted);
  const bool any_acted = std::any_of(answers.begin(), answers.end(), acted);
  ++summary.calls;
  if (all_acted) ++summary.acted;
  if (any_acted && !all_acted) ++summary.acted_unevenly;
  if (std::any_of(answers.begin(), answers.end(), replayed)) ++summary.replayed;
  if (std::any_of(answers.begin(), answers.end(), differs)) {
    ++summary.disagreements;
    if (!first_) first_ = Disagreement{summary.slot, answers};
  }
  follow(index, first);
  if (all_acted && !progress_[index].generation_acted) {
    progress_[index].generation_acted = true;
    ++summary.generations_acted;
    if (!summary.first_acted) summary.first_acted = first.call;
  }
  if (all_acted) summary.last_acted = first.call;
}

/// A switch shows where a question gets another answer than it got since the latest switch.
void Checker::follow(std::size_t index, const Record& record) {
  Progress& progress = progress_[index];
  CommunicatorSummary& summary = summaries_[index];
  if (record.generation != progress.generation) {
    const std::uint64_t next = progress.next;
    progress = {};
    progress.next = next;
    progress.generation = record.generation;
    summary.generations = record.generation + 1;
  }
  if (record.replayed) return;
  const std::uint64_t answer = answer_of(record);
  const auto [known, is_new] =
      progress.known.emplace(record.question, std::make_pair(answer, progress.epoch));
  if (is_new) return;
  auto& [known_answer, epoch] = known->second;
  if (known_answer != answer && epoch == progress.epoch) {
    ++progress.epoch;
    ++summary.switches;
  }
  known_answer = answer;
  epoch = progress.epoch;
}
