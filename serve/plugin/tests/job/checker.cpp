// Compares the ranks' records of a call once every rank that is still alive has written its own.
#include "tests/job/checker.h"

#include <algorithm>
#include <cstdio>
#include <sstream>

#include "tests/job/plugin_calls.h"

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

// The report. A small JSON writer is enough: the document has one form.

namespace {

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char letter : text) {
    const auto code = static_cast<unsigned char>(letter);
    if (letter == '"' || letter == '\\') {
      out += '\\';
      out += letter;
    } else if (code < 0x20) {
      char escape[8];
      std::snprintf(escape, sizeof escape, "\\u%04x", code);
      out += escape;
    } else {
      out += letter;
    }
  }
  return out + "\"";
}

template <typename Range, typename Write>
std::string listed(const Range& range, const Write& write) {
  std::string out;
  for (const auto& item : range) out += (out.empty() ? "" : ", ") + write(item);
  return "[" + out + "]";
}

std::string optional(const std::optional<std::uint64_t>& value) {
  return value ? std::to_string(*value) : "null";
}

double longest_ms(const Board& board, std::atomic<std::uint64_t> RankState::* field) {
  std::uint64_t longest_ns = 0;
  for (const RankState& rank : board.ranks) {
    longest_ns = std::max<std::uint64_t>(longest_ns, rank.*field);
  }
  return 1e-6 * static_cast<double>(longest_ns);
}

/// The texts of one kind (L, V, E) in a rank's log.
std::string texts(const std::string& log, char kind) {
  std::vector<std::string> found;
  std::istringstream lines(log);
  for (std::string line; std::getline(lines, line);) {
    if (line.size() >= 2 && line[0] == kind) found.push_back(line.substr(2));
  }
  return listed(found, quoted);
}

std::string answer_json(const Answer& answer) {
  const Record& record = answer.record;
  std::ostringstream out;
  out << "{\"rank\": " << answer.rank << ", \"call\": " << record.call
      << ", \"collective\": " << quoted(collective_name(record.collective))
      << ", \"size_bytes\": " << record.size_bytes
      << ", \"algorithm\": " << quoted(algorithm_name(record.algorithm))
      << ", \"protocol\": " << quoted(protocol_name(record.protocol))
      << ", \"num_channels\": " << record.num_channels
      << ", \"acted\": " << (record.acted ? "true" : "false")
      << ", \"replayed\": " << (record.replayed ? "true" : "false") << "}";
  return out.str();
}

std::string disagreement_json(const std::optional<Disagreement>& disagreement) {
  if (!disagreement) return "null";
  const Record& record = disagreement->answers.front().record;
  return "{\"comm\": " + std::to_string(disagreement->slot) +
         ", \"generation\": " + std::to_string(record.generation) +
         ", \"call\": " + std::to_string(record.call) +
         ", \"answers\": " + listed(disagreement->answers, answer_json) + "}";
}

std::string summary_json(const CommunicatorSummary& summary) {
  std::ostringstream out;
  const auto number = [](int rank) { return std::to_string(rank); };
  out << "{\"comm\": " << summary.slot << ", \"ranks\": " << listed(summary.members, number)
      << ", \"calls\": " << summary.calls << ", \"acted\": " << summary.acted
      << ", \"replayed\": " << summary.replayed << ", \"disagreements\": " << summary.disagreements
      << ", \"acted_unevenly\": " << summary.acted_unevenly
      << ", \"switches\": " << summary.switches << ", \"generations\": " << summary.generations
      << ", \"generations_acted\": " << summary.generations_acted
      << ", \"first_acted\": " << optional(summary.first_acted)
      << ", \"last_acted\": " << optional(summary.last_acted) << "}";
  return out.str();
}

std::string rank_json(const Board& board, const JobEnd& end, std::size_t rank) {
  const RankEnd& how = end.ranks[rank];
  const RankState& state = board.ranks[rank];
  std::ostringstream out;
  out << "{\"asked\": " << state.calls_asked << ", \"errors\": " << state.errors
      << ", \"error_texts\": " << texts(end.logs[rank], 'E')
      << ", \"violations\": " << state.violations
      << ", \"violation_texts\": " << texts(end.logs[rank], 'V')
      << ", \"exit\": " << (how.exited ? std::to_string(how.exit_code) : "null")
      << ", \"signal\": " << (how.signal != 0 ? std::to_string(how.signal) : "null")
      << ", \"log\": " << texts(end.logs[rank], 'L') << "}";
  return out.str();
}

}  // namespace

std::string to_json(const Options& options, const Checker& checker, const Board& board,
                    const JobEnd& end) {
  std::uint64_t calls = 0, acted = 0, uneven = 0, disagreements = 0, switches = 0, errors = 0,
                violations = 0;
  for (const CommunicatorSummary& summary : checker.communicators()) {
    calls += summary.calls;
    acted += summary.acted;
    uneven += summary.acted_unevenly;
    disagreements += summary.disagreements;
    switches += summary.switches;
  }
  int abnormal = 0;
  std::string ranks;
  for (std::size_t rank = 0; rank < end.ranks.size(); ++rank) {
    errors += board.ranks[rank].errors;
    violations += board.ranks[rank].violations;
    if (!end.ranks[rank].expected) ++abnormal;
    ranks += (rank > 0 ? ",\n  " : "") + rank_json(board, end, rank);
  }
  std::ostringstream out;
  out << "{\"release\": " << quoted(options.release) << ", \"calls\": " << calls
      << ", \"acted\": " << acted << ", \"acted_unevenly\": " << uneven
      << ", \"disagreements\": " << disagreements << ", \"switches\": " << switches
      << ", \"errors\": " << errors << ", \"violations\": " << violations
      << ", \"abnormal_exits\": " << abnormal
      << ", \"hit_deadline\": " << (end.hit_deadline ? "true" : "false")
      << ", \"wall_s\": " << end.wall_s
      << ", \"asked_longest_ms\": " << longest_ms(board, &RankState::asked_longest_ns)
      << ", \"created_longest_ms\": " << longest_ms(board, &RankState::created_longest_ns)
      << ",\n \"first_disagreement\": " << disagreement_json(checker.first_disagreement())
      << ",\n \"comms\": " << listed(checker.communicators(), summary_json)
      << ",\n \"ranks\": [\n  " << ranks << "]}\n";
  return out.str();
}
