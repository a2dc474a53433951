// Implementation of leader.h.
#include "arbiter/leader.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "identity/environment.h"
#include "platform/clock.h"
#include "table.h"

namespace dynamiccl {
namespace {

/// A probe takes so many calls; it ends at the first stop after them.
constexpr std::uint64_t kProbeCalls = 64;
/// Before a communicator's rate is known: NCCL's first calls connect, and take seconds.
constexpr std::uint64_t kFirstStop = 64, kFirstSpan = 64;
constexpr std::uint64_t kLeastSpan = 32, kMostSpan = 1'000'000;
/// Failed stops are tried again after this part of the time to the next one.
constexpr std::uint64_t kTriesOfInterval = 4;
/// Of a communicator that has had no stop for so long the times are old.
constexpr std::chrono::minutes kForgotten{10};
constexpr std::uint64_t kMetricsNs = 1'000'000'000;

double number_of(const char* variable, double fallback) {
  const char* text = std::getenv(variable);
  char* end = nullptr;
  const double number = text != nullptr ? std::strtod(text, &end) : -1.0;
  return text != nullptr && *end == '\0' && number >= 0.0 ? number : fallback;
}

bool is_table_for(const std::vector<std::uint8_t>& bytes, std::uint32_t num_nodes,
                  std::uint32_t num_ranks) {
  const auto decoded = std::make_unique<DecisionTable>();
  return decode_table(bytes.data(), bytes.size(), decoded.get()) == nullptr &&
         is_for(*decoded, num_nodes, num_ranks);
}

/// Of a table file, which ends with it.
std::uint64_t checksum_of(const std::vector<std::uint8_t>& bytes) {
  std::uint64_t checksum = 0;
  std::memcpy(&checksum, bytes.data() + bytes.size() - sizeof checksum, sizeof checksum);
  return checksum;
}

}  // namespace

Leader::Leader(std::uint64_t job)
    : job_(job),
      probe_calls_(static_cast<std::uint64_t>(number_of("DYNAMICCL_PROBE_CALLS", 6'400.0))),
      adapt_ns_(static_cast<std::uint64_t>(1e9 * number_of("DYNAMICCL_ADAPT_INTERVAL_S", 10.0))),
      stop_share_(std::max(1e-6, number_of("DYNAMICCL_STOP_PERCENT", 0.1) / 100.0)) {}

void Leader::hear(const Vote& vote, const std::string& body) {
  Told told;
  if (body.size() < sizeof told) return;
  std::memcpy(&told, body.data(), sizeof told);
  Group& group = groups_.try_emplace(vote.round.comm, vote.num_ranks).first->second;
  group.heard = std::chrono::steady_clock::now();
  Told& latest = group.latest;
  latest.lived_ns = std::max(latest.lived_ns, told.lived_ns);
  latest.waited_ns = std::max(latest.waited_ns, told.waited_ns);
  latest.in_force = told.in_force;
  latest.last_table = told.last_table;
  latest.num_nodes = told.num_nodes;
  latest.nccl_version = told.nccl_version;
  CallTime time;
  for (std::size_t at = sizeof told; at + sizeof time <= body.size(); at += sizeof time) {
    std::memcpy(&time, body.data() + at, sizeof time);
    group.guard.take(time);
  }
}

std::string Leader::system_of(std::uint32_t nccl_version) const {
  const std::string systems = text_of("DYNAMICCL_SYSTEMS");
  const char* system = find_system(systems.c_str(), static_cast<int>(nccl_version));
  return {system, std::strcspn(system, " ")};
}

/// The artifact's table, the first one or another one, and what the guard says of it.
void Leader::renew(Group* group, std::uint64_t comm_id, std::uint32_t num_ranks) {
  const std::string system = system_of(group->latest.nccl_version);
  if (system.empty() || !files_.knows(system, group->latest.nccl_version)) return;
  const auto table = files_.table(system, group->latest.num_nodes, num_ranks);
  if (table == nullptr) return;
  const bool is_other = group->artifact == nullptr || group->artifact->edition != table->edition;
  if (is_other && !is_table_for(table->bytes, group->latest.num_nodes, num_ranks)) return;
  if (group->artifact == nullptr) {
    group->artifact = table;
    group->table = table->bytes;
    // Installed since `init`, or they have what a leader before this one gave them.
    group->is_changed = checksum_of(table->bytes) != group->latest.last_table;
    group->why = group->is_changed ? "the artifact's table" : "";
  } else if (is_other) {
    group->artifact = table;
    group->table = table->bytes;
    group->guard.forget();
    brain_thread_.forget(comm_id);
    group->is_changed = true;
    group->why = "a new artifact";
  }
  take_answer(group, comm_id, num_ranks);
  if (probe_calls_ == 0 || group->is_changed) return;
  const std::vector<Guard::Slow> slow = group->guard.find_slow(table->noise);
  if (slow.empty()) return;
  char text[160];
  std::snprintf(
      text, sizeof text,
      "%zu choices withdrawn: collective %d around bin %d took %.1f us, NCCL's own %.1f us",
      slow.size(), slow[0].collective, slow[0].bin, slow[0].our_us, slow[0].own_us);
  group->is_changed = true;
  group->why = text;
}

void Leader::take_answer(Group* group, std::uint64_t comm_id, std::uint32_t num_ranks) {
  const auto answer = brain_thread_.take(comm_id);
  if (answer == nullptr) return;
  std::string problem = answer->problem;
  if (problem.empty()) {
    if (answer->table.empty() || answer->table == group->table) return;
    if (!is_table_for(answer->table, group->latest.num_nodes, num_ranks)) {
      problem = "its table is for another communicator";
    }
  }
  if (!problem.empty()) {
    if (group->why.empty()) group->why = "the brain gave no table: " + problem;
    return;
  }
  if (group->former.empty()) group->former = group->table;
  group->guard.choose_anew(group->table, answer->table);
  group->table = answer->table;
  group->is_changed = true;
  group->why = "the brain's";
}

void Leader::ask_brain(Group* group, std::uint64_t comm_id, std::uint32_t num_ranks) {
  const Told& now = group->latest;
  if (group->artifact == nullptr || now.lived_ns < group->asked_ns + adapt_ns_) return;
  if (group->guard.num_timed() == group->asked_with) return;  // it knows all that yet
  BrainAsk question = {files_.artifact(), system_of(now.nccl_version), now.num_nodes, num_ranks,
                       group->table,      group->guard.tasks()};
  if (!brain_thread_.ask(comm_id, std::move(question))) return;
  group->asked_ns = now.lived_ns;
  group->asked_with = group->guard.num_timed();
}

const char* Leader::propose(const Vote& first, Reply* question) {
  body_.clear();
  const int kill_file = files_.kill_file();
  const std::uint64_t comm_id = first.round.comm;
  if (first.round.number == 0) {
    if (kill_file > 0) return "a kill file is there";
    if (kill_file < 0) return "whether a kill file is there is not known yet";
    if (!first.has_stops) return nullptr;
    groups_.erase(comm_id);
    forget_silent();
    question->next_stop = kFirstStop;
    question->span_calls = kFirstSpan;
    return nullptr;
  }
  Group& group = groups_.try_emplace(comm_id, first.num_ranks).first->second;
  const std::uint64_t call = first.fields[1];
  const InForce before = group.latest.in_force;
  renew(&group, comm_id, first.num_ranks);

  const bool is_off = kill_file > 0;
  group.proposed = is_off ? InForce::kOwnChoice : InForce::kTable;
  if (kill_file < 0) group.proposed = before;
  group.is_off = is_off;
  const bool is_new = group.is_changed && group.proposed == InForce::kTable;
  if (before == InForce::kOwnChoice && !group.was_off) {
    // A probe's length cannot be chosen, since a stop may fail; the time to the next one can.
    const std::uint64_t took = call - std::min(group.probed_at, call);
    const std::uint64_t pause = group.probed_at > 0 ? took * probe_calls_ / kProbeCalls : 0;
    group.next_probe = call + std::max(probe_calls_, pause);
  }
  const bool may_probe = probe_calls_ > 0 && call >= std::max(probe_calls_, group.next_probe);
  const bool begins_probe = !is_off && !is_new && before == InForce::kTable && may_probe;
  if (begins_probe) {
    group.proposed = InForce::kOwnChoice;
    group.probed_at = call;
  } else if (!is_off && before == InForce::kTable) {
    ask_brain(&group, comm_id, first.num_ranks);
  }
  if (is_new) {
    question->change = Change::kNewTable;
    body_ = group.table;
    if (!group.guard.withdraw_from(&body_)) return "the leader has no table";
  } else if (group.proposed != before) {
    const bool is_own = group.proposed == InForce::kOwnChoice;
    question->change = is_own ? Change::kOwnChoice : Change::kLastTable;
  }
  const char* why = group.why.c_str();
  if (is_off) why = "a kill file is there: NCCL's own choice";
  if (!is_off && group.was_off) why = "the kill file is gone: back to the table";
  std::snprintf(question->reason, sizeof question->reason, "%s", why);
  place_next_stop(&group, call, begins_probe, question);
  write_metrics();
  return nullptr;
}

void Leader::place_next_stop(Group* group, std::uint64_t call, bool begins_probe, Reply* question) {
  // Of the time since the stop before, as far as this worker has seen it.
  const Told& now = group->latest;
  const double lived_ns = static_cast<double>(now.lived_ns - group->lived_ns) + 1.0;
  const double calls_per_ns = static_cast<double>(call - std::min(call, group->calls)) / lived_ns;
  const auto waited_ns =
      static_cast<double>(now.waited_ns - std::min(now.waited_ns, group->waited_ns));
  const double interval_ns =
      std::max(static_cast<double>(files_.look_ns()), waited_ns / stop_share_);
  group->calls = call;
  group->lived_ns = now.lived_ns;
  group->waited_ns = now.waited_ns;
  auto calls = static_cast<std::uint64_t>(std::min(1e12, calls_per_ns * interval_ns));
  if (begins_probe) calls = std::min(calls, kProbeCalls);
  question->span_calls = std::clamp(calls / kTriesOfInterval, kLeastSpan, kMostSpan);
  question->next_stop = call + std::max<std::uint64_t>(calls, 1);
}

/// Communicators come and go; nobody tells when one has gone.
void Leader::forget_silent() {
  const auto now = std::chrono::steady_clock::now();
  for (auto group = groups_.begin(); group != groups_.end();) {
    if (now < group->second.heard + kForgotten) {
      ++group;
      continue;
    }
    brain_thread_.forget(group->first);
    group = groups_.erase(group);
  }
}

void Leader::decided(const RoundKey& round, bool is_agreed) {
  const auto found = groups_.find(round.comm);
  if (found == groups_.end() || round.number == 0) return;
  Group& group = found->second;
  ++(is_agreed ? group.agreed : group.failed);
  if (!is_agreed) return;
  group.was_off = group.is_off;
  if (group.proposed == InForce::kOwnChoice) return;
  // Of what was tried before, calls were told until now.
  if (group.is_changed) group.guard.choose_anew(group.former, group.table);
  group.former.clear();
  group.is_changed = false;
  group.why.clear();
}

void Leader::write_metrics() {
  const std::uint64_t now_ns = monotonic_ns();
  if (now_ns < written_ns_ + kMetricsNs) return;
  written_ns_ = now_ns;
  static constexpr const char* kHelp[][3] = {
      {"dynamiccl_table", "gauge", "0: NCCL's own choice, 1: a table"},
      {"dynamiccl_off", "gauge", "1: a kill file was seen"},
      {"dynamiccl_stops_agreed", "counter", "Stops at which all ranks agreed"},
      {"dynamiccl_stops_failed", "counter", "Stops at which they did not"},
      {"dynamiccl_timed_calls", "counter", "Calls of which all ranks told the time"},
      {"dynamiccl_withdrawn", "gauge", "Choices that the guard withdrew"},
      {"dynamiccl_waited_us", "counter", "Time that calls of a rank's process waited at stops"},
  };
  std::string text;
  for (std::size_t i = 0; i < std::size(kHelp); ++i) {
    const auto& [name, kind, help] = kHelp[i];
    text += std::string("# HELP ") + name + " " + help + ".\n# TYPE " + name + " " + kind + "\n";
    for (const auto& [comm_id, group] : groups_) {
      const std::uint64_t values[] = {
          static_cast<std::uint64_t>(group.latest.in_force),
          static_cast<std::uint64_t>(files_.kill_file() > 0),
          group.agreed,
          group.failed,
          group.guard.num_timed(),
          group.guard.num_withdrawn(),
          group.latest.waited_ns / 1'000,
      };
      char line[160];
      std::snprintf(line, sizeof line,
                    "%s{comm=\"%016" PRIx64 "\",ranks=\"%u\",nodes=\"%u\"} %" PRIu64 "\n", name,
                    comm_id, group.guard.num_ranks(), group.latest.num_nodes, values[i]);
      text += line;
    }
  }
  char name[64];
  std::snprintf(name, sizeof name, "dynamiccl-%016" PRIx64 ".prom", job_);
  files_.write_metrics(name, text);
}

}  // namespace dynamiccl
