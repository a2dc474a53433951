// What the leader has of file systems: the artifact's tables, the kill file, and metrics. One
// thread waits for them, so that the worker never does: while a file server stalls, ranks wait for
// its answers.
//
//   DYNAMICCL_MACHINE          this machine, as the index has it. Default: any.
//   DYNAMICCL_ARTIFACT         directory of the artifact; read again when its plugin.index changes.
//   DYNAMICCL_KILL_FILE        while it is there NCCL's own choice stands, from the next stop on.
//   DYNAMICCL_LOOK_INTERVAL_S  about so many seconds from one look to the next. Default 1.
//   DYNAMICCL_METRICS_DIR      where counters are written, a file a job. Default: nowhere.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "file.h"
#include "identity/environment.h"
#include "platform/clock.h"
#include "table.h"

namespace dynamiccl {

/// The value of an environment variable; empty where it is not set.
inline std::string text_of(const char* variable) {
  const char* text = value_of(variable);
  return text != nullptr ? text : "";
}

/// A number of 0 or more.
inline double number_of(const char* variable, double otherwise) {
  const std::string text = text_of(variable);
  char* end = nullptr;
  const double number = std::strtod(text.c_str(), &end);
  return !text.empty() && *end == '\0' && number >= 0.0 ? number : otherwise;
}

class LeaderFiles {
 public:
  struct Table {
    std::uint64_t edition = 0;  // of the artifact: another one after each change
    std::vector<std::uint8_t> bytes;
    std::vector<double> noise;  // of each collective, a share
  };

  explicit LeaderFiles(const std::string& metrics_name) : metrics_name_(metrics_name) { start(); }

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
  std::shared_ptr<const Table> table(const std::string& system, std::uint32_t nccl_version,
                                     std::uint32_t num_nodes, std::uint32_t num_ranks) {
    const std::string machine = machine_ + ";nccl=" + std::to_string(nccl_version) + "\n";
    const std::lock_guard<std::mutex> lock(mutex_);
    if (system.empty()) return nullptr;
    if (!machine_.empty() && !find("system\t" + system + "\t" + machine)) return nullptr;
    return tables_[system + "/nodes" + std::to_string(num_nodes) + "_ranks" +
                   std::to_string(num_ranks) + ".dct"];
  }

  void write_metrics(const std::string& text) {
    const std::lock_guard<std::mutex> lock(mutex_);
    text_ = text;
  }

 private:
  /// Communicators that are made soon after a kill file has come keep NCCL's own choice.
  static constexpr std::uint64_t kKillFilePauseNs = 100'000'000;
  /// After so long without a look it is not known whether the file is there.
  static constexpr std::uint64_t kKnownMs = 5'000;
  static constexpr std::size_t kMostIndexBytes = 64 * 1024;  // as dynamiccl-prepare has it
  /// The first line of an index (serve/plugin_index.py).
  static constexpr const char* kIndexVersion = "dynamiccl-index\t1\n";
  static constexpr double kUnknownNoise = 0.05;  // where the artifact has no noise band

  /// Where no thread can be had the worker goes on without, and it is tried again at the next
  /// round: ranks that have confirmed need its answer.
  void start() {
    if (is_running_ || (artifact_.empty() && kill_path_.empty() && metrics_.empty())) return;
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
      if (!artifact_.empty()) read_artifact();
      if (!metrics_.empty()) replace_metrics();
      next_ns = monotonic_ns() + look_ns_ / 2;
    }
  }

  void read_artifact() {
    const std::string index = read(artifact_ + "/plugin.index", kMostIndexBytes);
    std::map<std::string, std::shared_ptr<const Table>> tables;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const bool is_index = index.rfind(kIndexVersion, 0) == 0;
      if (is_index && index != index_) {
        index_ = index;
        ++edition_;
      }
      tables = tables_;
    }
    for (const auto& [path, table] : tables) {
      if (edition_ == 0 || (table != nullptr && table->edition == edition_)) continue;
      // Of a new artifact that is half written the old table stays.
      const std::string bytes = read(artifact_ + "/tables/" + path, kMaxFileBytes);
      const auto fresh = std::make_shared<Table>();
      *fresh = {edition_, {bytes.begin(), bytes.end()}, {}};
      const auto decoded = std::make_unique<DecisionTable>();
      if (decode_table(fresh->bytes.data(), bytes.size(), decoded.get()) != nullptr) continue;
      const std::lock_guard<std::mutex> lock(mutex_);
      for (int collective = 0; collective < kNumCollectives; ++collective) {
        const std::string system = path.substr(0, path.find('/'));
        const char* ppm = find("noise\t" + system + "\t" + std::to_string(collective) + "\t");
        fresh->noise.push_back(ppm != nullptr ? 1e-6 * std::strtod(ppm, nullptr) : kUnknownNoise);
      }
      tables_[path] = fresh;
    }
  }

  /// What follows these words in a line of the index; null where it has none.
  const char* find(const std::string& words) const {
    const std::size_t at = index_.find("\n" + words);
    return at != std::string::npos ? index_.c_str() + at + 1 + words.size() : nullptr;
  }

  /// A file that nobody else may write to; empty where it cannot be had.
  static std::string read(const std::string& path, std::size_t most) {
    const File file(path.c_str());
    if (!file.is_open() || why_not_ours(file.descriptor(), S_IFREG) != nullptr) return "";
    std::string text(most, '\0');
    const ssize_t size = file.read_all(reinterpret_cast<std::uint8_t*>(text.data()), most);
    text.resize(static_cast<std::size_t>(std::max<ssize_t>(size, 0)));
    return text;
  }

  void replace_metrics() {
    std::string text;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      text.swap(text_);
    }
    if (text.empty()) return;
    const std::string path = metrics_ + "/" + metrics_name_, fresh = path + ".new";
    std::ofstream file(fresh, std::ios::trunc);
    file << text;
    file.close();
    if (file) std::rename(fresh.c_str(), path.c_str());
  }

  const std::string artifact_ = text_of("DYNAMICCL_ARTIFACT"),
                    kill_path_ = text_of("DYNAMICCL_KILL_FILE"),
                    metrics_ = text_of("DYNAMICCL_METRICS_DIR"),
                    machine_ = text_of("DYNAMICCL_MACHINE"), metrics_name_;
  const std::uint64_t look_ns_ =
      static_cast<std::uint64_t>(1e9 * std::max(0.01, number_of("DYNAMICCL_LOOK_INTERVAL_S", 1.0)));
  bool is_running_ = false;
  std::atomic<bool> has_kill_file_{false};
  std::atomic<std::uint64_t> looked_ms_{0};  // for it
  std::uint64_t edition_ = 0;                // the thread's

  std::mutex mutex_;  // of these
  std::string index_, text_;
  std::map<std::string, std::shared_ptr<const Table>> tables_;  // by path; null: wanted
};

}  // namespace dynamiccl
