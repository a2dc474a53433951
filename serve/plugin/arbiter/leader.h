// The leader of a job's communicators in mode adaptive: what is proposed at a stop, and when the
// next one comes (docs/plugin.md says in which order). It lives in the arbiter's worker and may be
// lost with it at any time: ranks hold what they use, and tell it at the next stop.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <memory>

#include "agree/vote.h"
#include "arbiter/brain_thread.h"
#include "arbiter/guard.h"
#include "platform/system.h"
#include "programs.h"

namespace dynamiccl {

/// A number of 0 or more.
inline double number_of(const char* variable, double otherwise) {
  const std::string text = text_of(variable);
  char* end = nullptr;
  const double number = std::strtod(text.c_str(), &end);
  return !text.empty() && *end == '\0' && number >= 0.0 ? number : otherwise;
}

/// What the leader has of file systems: the artifact's tables, the kill file, and metrics. One
/// thread waits for them, so that the worker never does: while a file server stalls, ranks wait for
/// its answers.
class LeaderFiles {
 public:
  struct Table {
    std::uint64_t edition;  // of the artifact: another one after each change
    std::string system;     // as it calls this machine
    std::vector<std::uint8_t> bytes;
    std::vector<double> noise;  // of each collective, a share
  };

  explicit LeaderFiles(const std::string& metrics_name) {
    if (!metrics_path_.empty()) metrics_path_ += "/" + metrics_name;
    start();
  }

  const std::string& artifact() const { return artifact_; }
  std::uint64_t look_ns() const { return look_ns_; }

  /// 1: there is a kill file, 0: there is none, -1: not known, yet or for 5 seconds.
  int kill_file() {
    start();
    if (kill_path_.empty()) return 0;
    return monotonic_ms() > looked_ms_ + kKnownMs ? -1 : int{has_kill_file_};
  }

  /// Null: the artifact has no sound one, or it has not been read yet; or this machine with this
  /// NCCL has another name, or none: a later artifact may have given it to another machine.
  std::shared_ptr<const Table> table(const Told& of, std::uint32_t num_ranks) {
    const char* found = find_system(systems_.c_str(), static_cast<int>(of.nccl_version));
    const std::string system(found, std::strcspn(found, " "));
    const std::string nccl = ";nccl=" + std::to_string(of.nccl_version) + "\n";
    const std::lock_guard<std::mutex> lock(mutex_);
    if (system.empty()) return nullptr;
    if (!machine_.empty() && !find("system\t" + system + "\t" + machine_ + nccl)) return nullptr;
    return tables_[system + "/nodes" + std::to_string(of.num_nodes) + "_ranks" +
                   std::to_string(num_ranks) + ".dct"];
  }

  void write_metrics(const std::string& text) {
    const std::lock_guard<std::mutex> lock(mutex_);
    metrics_ = text;
  }

 private:
  /// Communicators that are made soon after a kill file has come keep NCCL's own choice.
  static constexpr std::uint64_t kKillFilePauseNs = 100'000'000;
  /// After so long without a look it is not known whether the file is there.
  static constexpr std::uint64_t kKnownMs = 5'000;
  static constexpr double kUnknownNoise = 0.05;  // where the artifact has no noise band

  /// Where no thread can be had the worker goes on without, and it is tried again at the next
  /// round: ranks that have confirmed need its answer.
  void start() {
    if (is_running_ || (artifact_.empty() && kill_path_.empty() && metrics_path_.empty())) return;
    pthread_t thread;  // as long as the worker
    const auto run = [](void* files) -> void* { static_cast<LeaderFiles*>(files)->run(); };
    is_running_ = pthread_create(&thread, nullptr, run, this) == 0;
  }

  [[noreturn]] void run() {
    for (std::uint64_t next_ns = 0;; sleep_ns(std::min(look_ns_ / 2, kKillFilePauseNs))) {
      if (!kill_path_.empty()) {
        has_kill_file_ = may_exist(kill_path_.c_str());
        looked_ms_ = monotonic_ms();
      }
      if (monotonic_ns() < next_ns) continue;
      look();
      next_ns = monotonic_ns() + look_ns_ / 2;
    }
  }

  void look() {
    const std::string index = read(artifact_ + "/plugin.index", kMostIndexBytes);
    std::map<std::string, std::shared_ptr<const Table>> tables;
    std::string metrics;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (index != index_ && index.rfind(kIndexVersion, 0) == 0) {
        index_ = index;
        ++edition_;
      }
      tables = tables_;
      metrics.swap(metrics_);
    }
    for (const auto& [path, table] : tables) {
      if (edition_ == 0 || (table != nullptr && table->edition == edition_)) continue;
      // Of a new artifact that is half written the old table stays.
      const std::string bytes = read(artifact_ + "/tables/" + path, kMaxFileBytes);
      const auto fresh = std::make_shared<Table>();
      *fresh = {edition_, path.substr(0, path.find('/')), {bytes.begin(), bytes.end()}, {}};
      const auto decoded = std::make_unique<DecisionTable>();
      if (decode_table(fresh->bytes.data(), bytes.size(), decoded.get()) != nullptr) continue;
      const std::lock_guard<std::mutex> lock(mutex_);
      for (int collective = 0; collective < kNumCollectives; ++collective) {
        const std::string of = fresh->system + "\t" + std::to_string(collective) + "\t";
        const char* ppm = find("noise\t" + of);
        fresh->noise.push_back(ppm != nullptr ? 1e-6 * std::strtod(ppm, nullptr) : kUnknownNoise);
      }
      tables_[path] = fresh;
    }
    if (metrics.empty() || metrics_path_.empty()) return;
    const std::string fresh = metrics_path_ + ".new";
    std::ofstream file(fresh, std::ios::trunc);
    file << metrics;
    file.close();
    if (file) std::rename(fresh.c_str(), metrics_path_.c_str());
  }

  /// What follows these words in a line of the index; null where it has none.
  const char* find(const std::string& words) const {
    const std::size_t at = index_.find("\n" + words);
    return at != std::string::npos ? index_.c_str() + at + 1 + words.size() : nullptr;
  }

  /// Empty where it cannot be had.
  static std::string read(const std::string& path, std::size_t most) {
    std::string text;
    return read_ours(path, most, &text) == nullptr ? text : "";
  }

  const std::string artifact_ = text_of("DYNAMICCL_ARTIFACT");
  const std::string kill_path_ = text_of("DYNAMICCL_KILL_FILE");
  const std::string machine_ = text_of("DYNAMICCL_MACHINE");
  const std::string systems_ = text_of("DYNAMICCL_SYSTEMS");
  std::string metrics_path_ = text_of("DYNAMICCL_METRICS_DIR");
  const std::uint64_t look_ns_ =
      static_cast<std::uint64_t>(1e9 * std::max(0.01, number_of("DYNAMICCL_LOOK_INTERVAL_S", 1.0)));
  bool is_running_ = false;
  std::atomic<bool> has_kill_file_{false};
  std::atomic<std::uint64_t> looked_ms_{0};  // for it
  std::uint64_t edition_ = 0;                // the thread's

  std::mutex mutex_;  // of these
  std::string index_, metrics_;
  std::map<std::string, std::shared_ptr<const Table>> tables_;  // by path; null: wanted
};

class Leader {
 public:
  explicit Leader(std::uint64_t job) : files_("dynamiccl-" + hex_of(job) + ".prom") {}

  /// A new communicator gets no table then.
  bool may_see_kill_file() { return files_.kill_file() != 0; }
  /// Of what was proposed last.
  const std::vector<std::uint8_t>& body() const { return body_; }

  /// The body of a vote, before the round is decided.
  void hear(const Vote& vote, const std::string& body) {
    Told told;
    if (body.size() < sizeof told) return;
    std::memcpy(&told, body.data(), sizeof told);
    Group& group = groups_.try_emplace(vote.round.comm, vote.num_ranks).first->second;
    group.heard_ms = monotonic_ms();
    told.lived_ns = std::max(told.lived_ns, group.latest.lived_ns);
    told.waited_ns = std::max(told.waited_ns, group.latest.waited_ns);
    group.latest = told;
    CallTime time;
    for (std::size_t at = sizeof told; at + sizeof time <= body.size(); at += sizeof time) {
      std::memcpy(&time, body.data() + at, sizeof time);
      group.guard.take(time);
    }
  }

  /// All ranks have voted. Null, with what they are asked to confirm; or why they get nothing.
  const char* propose(const Vote& first, Reply* question) {
    body_.clear();
    const int kill_file = files_.kill_file();
    const std::uint64_t comm_id = first.round.comm;
    if (first.round.number == 0) {
      if (kill_file > 0) return "a kill file is there";
      if (kill_file < 0) return "whether a kill file is there is not known yet";
      if (!first.has_stops) return nullptr;
      const auto before = groups_.find(comm_id);
      if (before != groups_.end()) forget(before);
      forget_silent();
      question->next_stop = kFirstStop;
      question->span_calls = kFirstSpan;
      return nullptr;
    }
    Group& group = groups_.try_emplace(comm_id, first.num_ranks).first->second;
    const std::uint64_t call = first.fields[1];
    const bool has_table = group.latest.has_table != 0;
    renew(&group);

    group.is_off = kill_file > 0;
    // Where that is not known what is in force stays.
    group.gets_table = kill_file < 0 ? has_table : kill_file == 0;
    group.gets_new = group.gets_table && group.is_changed;
    if (!has_table && !group.was_off) {
      // A probe's length cannot be chosen, since a stop may fail; the time to the next one can.
      const std::uint64_t took = group.probed_at > 0 ? call - group.probed_at : 0;
      group.next_probe = call + std::max(probe_calls_, took * probe_calls_ / kProbeCalls);
    }
    const bool begins_probe = has_table && group.gets_table && !group.gets_new &&
                              probe_calls_ > 0 && call >= std::max(probe_calls_, group.next_probe);
    if (begins_probe) {
      group.gets_table = false;
      group.probed_at = call;
    } else if (has_table && !group.is_off) {
      ask_brain(&group);
    }
    if (group.gets_new) {
      question->change = Change::kNewTable;
      body_ = group.guard.allowed(group.table);
    } else if (group.gets_table != has_table) {
      question->change = has_table ? Change::kOwnChoice : Change::kLastTable;
    }
    const char* why = group.why.c_str();
    if (group.is_off) why = "a kill file is there: NCCL's own choice";
    if (!group.is_off && group.was_off) why = "the kill file is gone: back to the table";
    std::snprintf(question->reason, sizeof question->reason, "%s", why);
    place_next_stop(&group, call, begins_probe, question);
    write_metrics();
    return nullptr;
  }

  /// They have confirmed it, or not.
  void decided(const RoundKey& round, bool is_agreed) {
    const auto found = groups_.find(round.comm);
    if (found == groups_.end() || round.number == 0) return;
    Group& group = found->second;
    ++(is_agreed ? group.agreed : group.failed);
    if (!is_agreed) return;
    group.was_off = group.is_off;
    if (!group.gets_table) return;
    if (group.gets_new) group.guard.begin(group.table);
    group.is_changed = false;
    group.why.clear();
  }

 private:
  /// A probe takes so many calls; it ends at the first stop after them.
  static constexpr std::uint64_t kProbeCalls = 64;
  /// Before a communicator's rate is known: NCCL's first calls connect, and take seconds.
  static constexpr std::uint64_t kFirstStop = 64, kFirstSpan = 64;
  static constexpr std::uint64_t kLeastSpan = 32, kMostSpan = 1'000'000;
  /// Failed stops are tried again after this part of the time to the next one.
  static constexpr std::uint64_t kTriesOfInterval = 4;
  /// Of a communicator that has had no stop for so long the times are old.
  static constexpr std::uint64_t kForgottenMs = 600'000;
  static constexpr std::uint64_t kMetricsMs = 1'000;

  struct Group {
    explicit Group(std::uint32_t num_ranks) : guard(num_ranks) {}
    Told latest;  // the longest waits of any rank
    std::uint64_t heard_ms = 0;
    std::uint64_t calls = 0, lived_ns = 0, waited_ns = 0;  // at the stop before
    std::uint64_t probed_at = 0;                           // the call at which one began
    std::uint64_t next_probe = 0;
    std::uint64_t brain = 0;                     // its number; 0: it has not been asked
    std::uint64_t asked_ns = 0, asked_with = 0;  // when it was, and with how many times
    std::future<BrainAnswer> answer;             // to an open question
    std::shared_ptr<const LeaderFiles::Table> artifact;
    std::vector<std::uint8_t> table;  // to be in force, with what is withdrawn
    bool is_changed = false;          // and they have not agreed on it yet
    std::string why;                  // it was
    bool is_off = false, was_off = false, gets_table = true, gets_new = false;  // as proposed
    std::uint64_t agreed = 0, failed = 0;
    Guard guard;
  };

  static bool is_table_for(const std::vector<std::uint8_t>& bytes, const Group& group) {
    const auto decoded = std::make_unique<DecisionTable>();
    return decode_table(bytes.data(), bytes.size(), decoded.get()) == nullptr &&
           is_for(*decoded, group.latest.num_nodes, group.guard.num_ranks());
  }

  static void change(Group* group, const std::vector<std::uint8_t>& table, const char* why) {
    group->table = table;
    group->is_changed = true;
    group->why = why;
  }

  /// The artifact's table, the first one or another one, the brain's, and what the guard says of
  /// it.
  void renew(Group* group) {
    const Told& told = group->latest;
    const std::uint32_t num_ranks = group->guard.num_ranks();
    const auto table = files_.table(told, num_ranks);
    if (table == nullptr) return;
    const bool is_first = group->artifact == nullptr;
    if (is_first || group->artifact->edition != table->edition) {
      if (!is_table_for(table->bytes, *group)) return;
      group->artifact = table;
      group->guard = Guard(num_ranks);
      forget_brain(group);         // the next one decides by another artifact
      std::uint64_t checksum = 0;  // which a table file ends with
      std::memcpy(&checksum, &*table->bytes.end() - sizeof checksum, sizeof checksum);
      if (is_first && checksum == told.last_table) {
        group->table = table->bytes;
        group->guard.begin(table->bytes);
      } else {
        // Installed since `init`, or they have what a leader before this one gave them.
        change(group, table->bytes, is_first ? "the artifact's table" : "a new artifact");
      }
    }
    take_answer(group);
    if (probe_calls_ == 0 || group->is_changed) return;
    const std::string why = group->guard.withdraw_slow(table->noise);
    if (!why.empty()) change(group, group->table, why.c_str());
  }

  void take_answer(Group* group) {
    const bool is_asked = group->answer.valid();
    if (!is_asked || group->answer.wait_for(std::chrono::seconds(0)) != std::future_status::ready) {
      return;
    }
    auto [problem, table] = group->answer.get();
    if (problem.empty()) {
      if (table.empty() || table == group->table) return;
      if (is_table_for(table, *group)) return change(group, table, "the brain's");
      problem = "its table is for another communicator";
    }
    if (group->why.empty()) group->why = "the brain gave no table: " + problem;
  }

  void ask_brain(Group* group) {
    const Told& now = group->latest;
    const bool is_due = now.lived_ns >= group->asked_ns + adapt_ns_;
    const bool has_new = group->guard.num_timed() != group->asked_with;
    const bool is_asked = group->answer.valid();
    if (group->artifact == nullptr || group->is_changed || !is_due || !has_new || is_asked) return;
    if (group->brain == 0) group->brain = ++num_brains_;
    BrainQuestion question = {
        files_.artifact(), group->artifact->system, now.num_nodes, group->guard.num_ranks(),
        group->table,      group->guard.tasks(),    group->brain};
    group->answer = brain_thread_.ask(std::move(question));
    if (!group->answer.valid()) return;
    group->asked_ns = now.lived_ns;
    group->asked_with = group->guard.num_timed();
  }

  void place_next_stop(Group* group, std::uint64_t call, bool begins_probe, Reply* question) {
    // Of the time since the stop before, as far as this worker has seen it.
    const Told& now = group->latest;
    const double lived_ns = static_cast<double>(now.lived_ns - group->lived_ns) + 1.0;
    const double calls_per_ns = static_cast<double>(call - group->calls) / lived_ns;
    const double waited_ns = static_cast<double>(now.waited_ns - group->waited_ns);
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
  void forget_silent() {
    for (auto next = groups_.begin(); next != groups_.end();) {
      const auto group = next++;
      if (monotonic_ms() >= group->second.heard_ms + kForgottenMs) forget(group);
    }
  }

  void forget(std::map<std::uint64_t, Group>::iterator group) {
    forget_brain(&group->second);
    groups_.erase(group);
  }

  void forget_brain(Group* group) {
    if (group->brain != 0) brain_thread_.forget(std::exchange(group->brain, 0));
    group->answer = {};
  }

  void write_metrics() {
    if (monotonic_ms() < written_ms_ + kMetricsMs) return;
    written_ms_ = monotonic_ms();
    std::map<std::string, std::string> lines;  // by name and type
    for (const auto& [comm_id, group] : groups_) {
      const std::string labels = "{comm=\"" + hex_of(comm_id) + "\",ranks=\"" +
                                 std::to_string(group.guard.num_ranks()) + "\",nodes=\"" +
                                 std::to_string(group.latest.num_nodes) + "\"} ";
      const std::pair<std::string, std::uint64_t> values[] = {
          {"dynamiccl_table gauge", group.latest.has_table},
          {"dynamiccl_off gauge", files_.kill_file() > 0},  // a kill file was seen
          {"dynamiccl_stops_agreed counter", group.agreed},
          {"dynamiccl_stops_failed counter", group.failed},
          {"dynamiccl_timed_calls counter", group.guard.num_timed()},
          {"dynamiccl_withdrawn gauge", group.guard.num_withdrawn()},
          {"dynamiccl_waited_us counter", group.latest.waited_ns / 1'000},
      };
      for (const auto& [name, value] : values) {
        lines[name] += name.substr(0, name.find(' ')) + labels + std::to_string(value) + "\n";
      }
    }
    std::string text;
    for (const auto& [name, values] : lines) text += "# TYPE " + name + "\n" + values;
    files_.write_metrics(text);
  }

  const std::uint64_t probe_calls_ =
      static_cast<std::uint64_t>(number_of("DYNAMICCL_PROBE_CALLS", 6'400.0));
  const std::uint64_t adapt_ns_ =
      static_cast<std::uint64_t>(1e9 * number_of("DYNAMICCL_ADAPT_INTERVAL_S", 10.0));
  const double stop_share_ = std::max(1e-6, number_of("DYNAMICCL_STOP_PERCENT", 0.1) / 100.0);
  std::uint64_t written_ms_ = 0;
  LeaderFiles files_;
  BrainThread brain_thread_;
  std::uint64_t num_brains_ = 0;
  std::map<std::uint64_t, Group> groups_;
  std::vector<std::uint8_t> body_;
};

}  // namespace dynamiccl
