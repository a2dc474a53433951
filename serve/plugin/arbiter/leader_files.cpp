// Implementation of leader_files.h.
#include "arbiter/leader_files.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <system_error>
#include <thread>

#include "file.h"
#include "platform/clock.h"
#include "table.h"

namespace dynamiccl {
namespace {

/// Communicators that are made soon after a kill file has come keep NCCL's own choice.
constexpr std::chrono::milliseconds kKillFilePause{100};
/// After so long without a look it is not known whether the file is there.
constexpr std::uint64_t kKnownMs = 5'000;
/// The first line of an index (serve/plugin_index.py).
constexpr const char* kIndexVersion = "dynamiccl-index\t1";

/// Whether nobody else may write to it; and what changes whenever the file does.
bool may_be_trusted(const std::string& path, std::string* stamp) {
  const File file(path.c_str());
  struct stat facts = {};
  if (!file.is_open() || why_not_ours(file.descriptor(), S_IFREG) != nullptr) return false;
  if (fstat(file.descriptor(), &facts) != 0) return false;
  std::ostringstream text;
  text << facts.st_dev << ' ' << facts.st_ino << ' ' << facts.st_size << ' ' << facts.st_mtim.tv_sec
       << ' ' << facts.st_mtim.tv_nsec;
  *stamp = text.str();
  return true;
}

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace

std::string text_of(const char* variable) {
  const char* text = std::getenv(variable);
  return text != nullptr ? text : "";
}

LeaderFiles::LeaderFiles()
    : artifact_(text_of("DYNAMICCL_ARTIFACT")),
      kill_path_(text_of("DYNAMICCL_KILL_FILE")),
      metrics_(text_of("DYNAMICCL_METRICS_DIR")),
      machine_(text_of("DYNAMICCL_MACHINE")) {
  const std::string seconds = text_of("DYNAMICCL_LOOK_INTERVAL_S");
  look_ns_ = static_cast<std::uint64_t>(
      1e9 * std::max(0.01, seconds.empty() ? 1.0 : std::strtod(seconds.c_str(), nullptr)));
  start();
}

/// Where no thread can be had the worker goes on without: ranks that have confirmed need its
/// answer.
void LeaderFiles::start() {
  if (is_running_ || (artifact_.empty() && kill_path_.empty() && metrics_.empty())) return;
  try {
    std::thread(&LeaderFiles::run, this).detach();  // as long as the worker
    is_running_ = true;
  } catch (const std::system_error&) {  // tried again at the next round
  }
}

int LeaderFiles::kill_file() {
  start();
  if (kill_path_.empty()) return 0;
  const std::uint64_t looked_ms = looked_ms_;
  if (looked_ms == 0 || monotonic_ms() > looked_ms + kKnownMs) return -1;
  return has_kill_file_ ? 1 : 0;
}

void LeaderFiles::run() {
  using Clock = std::chrono::steady_clock;
  const std::chrono::nanoseconds pause(look_ns_ / 2);
  for (Clock::time_point next = Clock::now();;) {
    if (!kill_path_.empty()) {
      has_kill_file_ = may_exist(kill_path_.c_str());
      looked_ms_ = monotonic_ms();
    }
    if (Clock::now() >= next) {
      look();
      next = Clock::now() + pause;
    }
    std::this_thread::sleep_for(std::min<std::chrono::nanoseconds>(pause, kKillFilePause));
  }
}

void LeaderFiles::look() {
  const std::string index = artifact_ + "/plugin.index";
  std::string stamp;
  if (!artifact_.empty() && may_be_trusted(index, &stamp) && stamp != stamp_) {
    stamp_ = stamp;
    if (read_index(index)) ++edition_;
  }
  std::map<std::string, std::shared_ptr<const Table>> tables;
  std::map<std::string, std::string> texts;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    tables = tables_;
    texts.swap(texts_);
  }
  for (auto& [path, table] : tables) {
    if (edition_ == 0 || (table != nullptr && table->edition == edition_)) continue;
    // Of a new artifact that is half written the old table stays.
    const std::string system = path.substr(0, path.find('/'));
    const auto fresh = read(artifact_ + "/tables/" + path, system);
    if (fresh == nullptr) continue;
    const std::lock_guard<std::mutex> lock(mutex_);
    tables_[path] = fresh;
  }
  for (const auto& [name, text] : texts) {
    const std::string path = metrics_ + "/" + name, fresh = path + ".new";
    std::ofstream file(fresh, std::ios::trunc);
    file << text;
    file.close();
    if (file) std::rename(fresh.c_str(), path.c_str());
  }
}

/// Lines of tab-separated words; of them `noise SYSTEM COLLECTIVE PPM` and `system SYSTEM
/// FINGERPRINT`. False for another format.
bool LeaderFiles::read_index(const std::string& path) {
  std::istringstream lines(read_file(path));
  std::string first;
  if (!std::getline(lines, first) || first != kIndexVersion) return false;
  noise_.clear();
  std::set<std::string> systems;
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string kind, system;
    std::size_t collective = 0;
    double ppm = 0.0;
    std::getline(words, kind, '\t');
    if (kind == "system") systems.insert(line.substr(kind.size() + 1));
    if (kind != "noise") continue;
    if (!std::getline(words, system, '\t') || !(words >> collective >> ppm)) continue;
    if (collective >= kNumCollectives) continue;
    noise_.emplace(system, std::vector<double>(kNumCollectives, -1.0)).first->second[collective] =
        ppm * 1e-6;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  systems_.swap(systems);
  return true;
}

bool LeaderFiles::knows(const std::string& system, std::uint32_t nccl_version) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const std::string nccl = ";nccl=" + std::to_string(nccl_version);
  return machine_.empty() || systems_.count(system + "\t" + machine_ + nccl) != 0;
}

std::shared_ptr<const LeaderFiles::Table> LeaderFiles::read(const std::string& path,
                                                            const std::string& system) const {
  std::string stamp;
  if (!may_be_trusted(path, &stamp)) return nullptr;
  const std::string text = read_file(path);
  auto table = std::make_shared<Table>();
  table->edition = edition_;
  table->bytes.assign(text.begin(), text.end());
  const auto decoded = std::make_unique<DecisionTable>();
  if (decode_table(table->bytes.data(), table->bytes.size(), decoded.get()) != nullptr) {
    return nullptr;
  }
  const auto noise = noise_.find(system);
  if (noise != noise_.end()) table->noise = noise->second;
  return table;
}

std::shared_ptr<const LeaderFiles::Table> LeaderFiles::table(const std::string& system,
                                                             std::uint32_t num_nodes,
                                                             std::uint32_t num_ranks) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return tables_[system + "/nodes" + std::to_string(num_nodes) + "_ranks" +
                 std::to_string(num_ranks) + ".dct"];
}

void LeaderFiles::write_metrics(const std::string& name, const std::string& text) {
  if (metrics_.empty()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  texts_[name] = text;
}

}  // namespace dynamiccl
