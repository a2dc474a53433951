// A small JSON writer is enough: the document has one form.
#include <cstdio>
#include <sstream>

#include "tests/job/checker.h"
#include "tests/job/plugin_calls.h"

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
