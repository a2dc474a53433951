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

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace dynamiccl {

/// The value of an environment variable; empty where it is not set.
std::string text_of(const char* variable);

class LeaderFiles {
 public:
  struct Table {
    std::uint64_t edition;  // of the artifact: another one after each change
    std::vector<std::uint8_t> bytes;
    std::vector<double> noise;  // of each collective, a share; negative: not known
  };

  LeaderFiles();

  const std::string& artifact() const { return artifact_; }
  std::uint64_t look_ns() const { return look_ns_; }
  /// 1: there is a kill file, 0: there is none, -1: not known, yet or for 5 seconds.
  int kill_file();
  /// Whether the artifact, as it is now, still has this name for this machine and NCCL: a later one
  /// may have given it to another machine.
  bool knows(const std::string& system, std::uint32_t nccl_version);
  /// Null: the artifact has no sound one, or it has not been read yet.
  std::shared_ptr<const Table> table(const std::string& system, std::uint32_t num_nodes,
                                     std::uint32_t num_ranks);
  /// Replaces the file of that name among the metrics.
  void write_metrics(const std::string& name, const std::string& text);

 private:
  void start();
  [[noreturn]] void run();
  void look();
  bool read_index(const std::string& path);
  std::shared_ptr<const Table> read(const std::string& path, const std::string& system) const;

  std::string artifact_, kill_path_, metrics_, machine_;
  std::uint64_t look_ns_;
  bool is_running_ = false;
  std::atomic<bool> has_kill_file_{false};
  std::atomic<std::uint64_t> looked_ms_{0};  // for it; 0: not yet

  std::mutex mutex_;               // of these
  std::set<std::string> systems_;  // the index's lines of systems, but for the first word
  std::map<std::string, std::shared_ptr<const Table>> tables_;  // by path; null: wanted
  std::map<std::string, std::string> texts_;                    // to be written

  // The thread's.
  std::string stamp_;
  std::uint64_t edition_ = 0;
  std::map<std::string, std::vector<double>> noise_;  // by system
};

}  // namespace dynamiccl
