// dynamiccl-prepare: what a rank must know before it loads the plugin.
//
//   dynamiccl-prepare HOME COMMAND_PID LAUNCHER_PID         lines for a shell (dynamiccl-run)
//   dynamiccl-prepare --facts [--nccl LIBRARY] [ARTIFACT]   a line of JSON (dynamiccl-deploy)
//
// The first form never fails a job: what keeps its ranks from using a table becomes
// DYNAMICCL_PROBLEM. Exit code of the second: 0; 2 wrong usage; 3 the artifact cannot be used; 4
// the machine cannot be named. LIBRARY is the job's libnccl.so.2: without it the fingerprint has
// nccl=0.
#include "prepare/prepare.h"

#include <glob.h>
#include <limits.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>

#include "file.h"
#include "platform/dynamic.h"
#include "prepare/fingerprint.h"
#include "vocabulary.h"

namespace dynamiccl {
namespace {

constexpr int kUsage = 2, kBadArtifact = 3, kBadMachine = 4;
/// A driver that answers no more must not keep a job from starting.
constexpr unsigned kMostSeconds = 25;
constexpr std::size_t kMaxIndexBytes = 64 * 1024;

// --- The artifact and this machine ----------------------------------------------------------

struct Artifact {
  std::string directory;     // without links
  std::uint64_t digest = 0;  // of plugin.index: the ranks compare it
  /// What it calls this machine, by NCCL's release. One that has two names is known by neither.
  std::map<std::string, std::string> systems;
  std::string problem;  // why nothing of it may be used; empty: nothing
};

/// A system's name becomes part of a path.
bool is_name(const std::string& name) {
  return !name.empty() && name.find_first_of("._-") != 0 &&
         name.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789._-") == std::string::npos;
}

/// All of a file that may steer jobs, at most so many bytes. Null, or why not.
const char* read_ours(const std::string& path, unsigned forbidden, std::size_t most,
                      std::string* text) {
  const File file(path.c_str(), O_RDONLY | O_NONBLOCK | O_NOFOLLOW);
  if (!file.is_open()) {
    if (errno == ENOENT) return "there is no such file";
    return errno == ELOOP ? "it is a symbolic link" : "it cannot be opened";
  }
  if (const char* why = why_not_ours(file.descriptor(), S_IFREG, forbidden)) return why;
  text->resize(most + 1);
  const ssize_t size = file.read_all(reinterpret_cast<std::uint8_t*>(text->data()), text->size());
  if (size < 0) return "it cannot be read";
  text->resize(static_cast<std::size_t>(size));
  return text->size() > most ? "it is too long" : nullptr;
}

/// Why not, or null.
const char* read_index(const std::string& directory, std::string* text) {
  const std::string path = directory + "/plugin.index";
  if (const char* why = read_ours(path, S_IWGRP | S_IWOTH, kMaxIndexBytes, text)) return why;
  if (text->empty() || text->back() != '\n') return "it is cut off";
  if (text->find('\0') != std::string::npos) return "it is no text";
  const bool is_index = text->rfind("dynamiccl-index\t1\n", 0) == 0;
  return is_index ? nullptr : "it is not a DynamICCL index of format version 1";
}

/// The key of a job's messages, of all bytes of a file. Null, or why not.
const char* read_key(const std::string& path, Key* key) {
  constexpr std::size_t kLeastBytes = 16, kMostBytes = 4096;
  std::string text;
  if (const char* why = read_ours(path, S_IRWXG | S_IRWXO, kMostBytes, &text)) return why;
  if (text.size() < kLeastBytes) return "it is shorter than 16 bytes";
  *key = {siphash({0, 1}, text.data(), text.size()), siphash({0, 2}, text.data(), text.size())};
  return nullptr;
}

/// `machine`: its fingerprint without the release of NCCL.
Artifact read_artifact(const std::string& named, const std::string& machine) {
  Artifact artifact;
  char path[PATH_MAX];
  if (realpath(named.c_str(), path) == nullptr) {
    artifact.problem = "there is no such file";
    return artifact;
  }
  artifact.directory = path;
  std::string text;
  if (const char* why = read_index(path, &text)) {
    artifact.problem = why;
    return artifact;
  }
  artifact.digest = siphash({}, text.data(), text.size());
  const std::string here = "\t" + machine + ";nccl=";
  for (std::size_t next = 0, end; next < text.size(); next = end + 1) {
    end = text.find('\n', next);
    const std::string line = text.substr(next, end - next);
    const std::size_t at = line.find(here);
    if (line.rfind("system\t", 0) != 0 || at == std::string::npos) continue;
    const std::string name = line.substr(7, at - 7), nccl = line.substr(at + here.size());
    if (!is_name(name) || nccl.find_first_not_of("0123456789") != std::string::npos) continue;
    const auto [known, is_new] = artifact.systems.emplace(nccl, name);
    if (!is_new && known->second != name) known->second = "";
  }
  return artifact;
}

/// What a function of a library returns, 0 on success; -1 where there is none of that name.
template <typename... Arguments>
int call(void* library, const char* name, Arguments... arguments) {
  const auto function = reinterpret_cast<int (*)(Arguments...)>(find_symbol(library, name));
  return function != nullptr ? function(arguments...) : -1;
}

int print_facts(Words words) {
  int nccl = 0;
  if (words.size() > 1 && words[0] == "--nccl") {
    void* library = open_library(words[1].c_str());
    if (library == nullptr) {
      std::fprintf(stderr, "error: cannot load %s: %s\n", words[1].c_str(), library_error());
      return kBadMachine;
    }
    if (call(library, "ncclGetVersion", &nccl) != 0) nccl = 0;
    words.erase(words.begin(), words.begin() + 2);
  }
  if (words.size() > 1 || (!words.empty() && words[0][0] == '-')) {
    std::fputs("usage: dynamiccl-prepare --facts [--nccl LIBRARY] [ARTIFACT]\n", stderr);
    return kUsage;
  }
  char fingerprint[kFingerprintBytes];
  if (!take_fingerprint(nccl, fingerprint)) {
    std::fputs("error: a GPU or NIC of this machine cannot be read in /proc or /sys\n", stderr);
    return kBadMachine;
  }
  // No text in the index needs an escape in JSON.
  std::printf(R"({"plugin_version": "%s", "fingerprint": "%s")", kPluginVersion, fingerprint);
  Artifact artifact;
  if (!words.empty()) {
    artifact = read_artifact(words[0], {fingerprint, std::strstr(fingerprint, ";nccl=")});
    const std::string system = artifact.systems[std::to_string(nccl)];
    if (!artifact.problem.empty()) {
      std::printf(R"(, "artifact_problem": "%s")", artifact.problem.c_str());
    } else {
      std::printf(R"(, "system": %s)", system.empty() ? "null" : ('"' + system + '"').c_str());
    }
  }
  std::puts("}");
  return artifact.problem.empty() ? 0 : kBadArtifact;
}

/// Whether ranks of one nNodes may be on several hosts: NCCL joins those that one NVLink fabric
/// connects, GPUs of one cluster (2.30.7 src/mnnvl.cc). In doubt they may. `has_gpus`: as the
/// kernel's files say.
bool may_have_fabric(bool has_gpus) {
  // nvml.h: nvmlGpuFabricInfo_t; NVML_INIT_FLAG_NO_ATTACH; NVML_ERROR_NOT_SUPPORTED.
  struct FabricInfo {
    unsigned char cluster[16];
    int status;
    unsigned clique;
    unsigned char state;
  };
  constexpr unsigned kNoAttach = 2;
  constexpr int kNotSupported = 3;
  void* nvml = open_library("libnvidia-ml.so.1");
  if (nvml == nullptr) return has_gpus;
  unsigned num_gpus = 0;
  if (call(nvml, "nvmlInitWithFlags", kNoAttach) != 0) return true;
  if (call(nvml, "nvmlDeviceGetCount_v2", &num_gpus) != 0) return true;
  for (unsigned i = 0; i < num_gpus; ++i) {
    void* gpu = nullptr;
    FabricInfo info = {};
    if (call(nvml, "nvmlDeviceGetHandleByIndex_v2", i, &gpu) != 0) return true;
    const int code = call(nvml, "nvmlDeviceGetGpuFabricInfo", gpu, &info);
    if (code != 0 && code != kNotSupported) return true;
    if (std::count(info.cluster, std::end(info.cluster), 0) != sizeof info.cluster) return true;
  }
  return false;
}

/// Removes words that ranks left in /dev/shm. A word is decided within a minute or so. Whoever
/// comes an hour later to one that is gone makes a new one, is alone there, and abstains: as it
/// would have read, if ten seconds later.
void sweep_words() {
  constexpr time_t kOldS = 3'600;
  const std::string mine = "/dev/shm/dynamiccl-" + std::to_string(geteuid()) + "-*";
  glob_t found = {};
  glob(mine.c_str(), GLOB_NOSORT, nullptr, &found);
  for (std::size_t i = 0; i < found.gl_pathc; ++i) {
    struct stat status;
    const bool is_there = lstat(found.gl_pathv[i], &status) == 0;
    if (is_there && time(nullptr) - status.st_mtime > kOldS) unlink(found.gl_pathv[i]);
  }
  globfree(&found);
}

// --- What dynamiccl-run evaluates -----------------------------------------------------------

/// Collects what the shell evaluates, and sets it here too: the arbiter inherits it.
class Lines {
 public:
  /// An empty value unsets it: it may be left of another dynamiccl-run.
  void set(const char* name, const std::string& text) {
    if (text.empty()) {
      unsetenv(name);
      text_ += std::string("unset ") + name + "\n";
      return;
    }
    setenv(name, text.c_str(), 1);
    text_ += std::string("export ") + name + "='";
    for (const char c : text) text_ += c == '\'' ? "'\\''" : std::string(1, c);
    text_ += "'\n";
  }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

void note(const std::string& text) { std::fprintf(stderr, "dynamiccl-run: %s\n", text.c_str()); }

std::string hex_of(std::uint64_t number) {
  char text[20];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(number));
  return text;
}

/// A port for one purpose of a job: below those that systems give out themselves (from 32768),
/// above the well-known ones.
std::string port_of(std::uint64_t job, std::uint64_t purpose) {
  return std::to_string(20'000 + (job + purpose * 0x9e3779b97f4a7c15U) % 12'000);
}

/// Why no table may be used; empty: nothing is in the way. Sets what the tuner looks for.
std::string give_tables(const std::string& named, const std::string& machine, Lines* lines) {
  const Artifact artifact = read_artifact(named, machine);
  const std::string wanted = value("DYNAMICCL_SYSTEM");
  std::string systems;
  for (const auto& [nccl, system] : artifact.systems) {
    if (system.empty() || (!wanted.empty() && system != wanted)) continue;
    systems += (systems.empty() ? "" : " ") + nccl + "=" + system;
  }
  lines->set("DYNAMICCL_MACHINE", machine);
  lines->set("DYNAMICCL_SYSTEMS", systems);
  lines->set("DYNAMICCL_INDEX", artifact.digest != 0 ? hex_of(artifact.digest) : "");
  lines->set("DYNAMICCL_TABLES", systems.empty() ? "" : artifact.directory + "/tables");
  if (!artifact.problem.empty()) {
    return "the artifact's index: " + artifact.problem + ", " + named +
           "/plugin.index; see 'dynamiccl-deploy doctor'";
  }
  if (machine.empty()) return "a GPU or NIC of this machine cannot be read in /proc or /sys";
  if (!systems.empty()) return "";
  return "the artifact does not know this machine" +
         (wanted.empty() ? "" : " as DYNAMICCL_SYSTEM=" + wanted) + ", " + machine +
         "; see 'dynamiccl-deploy bind'";
}

/// Where the job's arbiter may be: the first may be somebody else's.
Words ports_of_arbiter(std::uint64_t job) {
  return {port_of(job, 1), port_of(job, 2), port_of(job, 3)};
}

/// What DYNAMICCL_ARBITER is to be; empty: none. Starts one where this is the first rank's host and
/// none answers yet: that of a rank which its launcher has started again goes on. `ends_with`: it
/// ends with the last of these processes.
std::string seek_arbiter(const Start& start, const std::string& by_hand, const Key& key,
                         const std::string& home, const Words& ends_with) {
  if (start.host.empty() && by_hand.empty()) {
    const char* why =
        "the host of rank 0 is not known here: set MASTER_ADDR, or DYNAMICCL_ARBITER=HOST:PORT, "
        "for "
        "all ranks";
    if (start.is_first) note(why);
    return "";
  }
  const bool may_start = start.is_first && (start.is_rank || by_hand.empty());
  std::vector<Endpoint> endpoints;
  for (const std::string& port : ports_of_arbiter(start.id)) {
    if (!start.host.empty()) endpoints.push_back({may_start ? "127.0.0.1" : start.host, port});
  }
  if (!by_hand.empty()) {  // HOST:PORT or [IPV6]:PORT
    const std::size_t colon = std::min(by_hand.rfind(':'), by_hand.size() - 1);
    std::string host = by_hand.substr(0, colon);
    if (host[0] == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
    endpoints.push_back({host, by_hand.substr(colon + 1)});
  }
  if (may_start && find_arbiter(start.id, key, endpoints, 0).empty()) {
    const Words ports = ports_of_arbiter(start.id);
    bool is_started = false;
    for (std::size_t i = 0; i < ports.size() && !is_started; ++i) {
      Words words = {ports[i]};
      words.insert(words.end(), ends_with.begin(), ends_with.end());
      const bool is_last = i + 1 == ports.size();
      is_started = start_arbiter(home + "/bin/dynamiccl-arbiter", words, is_last);
    }
    if (!is_started) return "";
  }
  const std::string found = find_arbiter(start.id, key, endpoints, limits_of_job().vote_ms);
  if (!found.empty()) return found;
  std::string tried;
  for (const Endpoint& one : endpoints) tried += " " + one.host + ":" + one.port;
  note("no arbiter of this job answers at" + tried + ": where ranks need one NCCL's own choice " +
       "stands; DYNAMICCL_ARBITER=HOST:PORT names another");
  return "";
}

/// `words`: HOME COMMAND_PID LAUNCHER_PID
int prepare(const Words& words) {
  alarm(kMostSeconds);
  const Start start = find_start();
  const std::string by_hand = value("DYNAMICCL_ARBITER"), mode = value("DYNAMICCL_MODE");
  Lines lines;
  char host[HOST_NAME_MAX + 1] = "";
  gethostname(host, sizeof host - 1);
  lines.set("DYNAMICCL_JOB", hex_of(start.id));
  lines.set("DYNAMICCL_HOST", host);

  const auto path_of = [](const char* variable, const std::string& otherwise) {
    char here[PATH_MAX];
    const std::string path = value(variable);
    if (path.empty() || path[0] == '/' || getcwd(here, sizeof here) == nullptr) {
      return path.empty() ? otherwise : path;
    }
    return std::string(here) + "/" + path;  // the job may go elsewhere
  };
  const std::string artifact = path_of("DYNAMICCL_ARTIFACT", words[0] + "/artifact");
  char fingerprint[kFingerprintBytes] = "";
  const bool is_named = take_fingerprint(0, fingerprint);
  const std::string machine(fingerprint,
                            is_named ? std::strstr(fingerprint, ";nccl=") : fingerprint);
  lines.set("DYNAMICCL_ARTIFACT", artifact);
  const std::string problem = give_tables(artifact, machine, &lines);
  lines.set("DYNAMICCL_PROBLEM", problem);
  // By the name that stays when another artifact is installed.
  const std::string kill_file = path_of("DYNAMICCL_KILL_FILE", artifact + "/kill");
  lines.set("DYNAMICCL_KILL_FILE", kill_file);
  // The arbiter's, which is in no directory of the job's.
  for (const char* name : {"DYNAMICCL_METRICS_DIR", "DYNAMICCL_BRAIN_SOCKET"}) {
    lines.set(name, path_of(name, ""));
  }
  if (mode != "observe" && (start.is_first)) {  // not all of a thousand
    const bool is_killed = access(kill_file.c_str(), F_OK) == 0;
    if (!problem.empty()) note("NCCL's own choice stands: " + problem);
    if (is_killed) note("NCCL's own choice stands while " + kill_file + " is there");
  }

  Key key;
  const std::string key_file = value("DYNAMICCL_KEY_FILE");
  const char* why_no_key = read_key(key_file, &key);
  lines.set("DYNAMICCL_KEY", why_no_key == nullptr ? hex_of(key.low) + hex_of(key.high) : "");
  const bool is_one_host = start.hosts == Hosts::kOne && by_hand.empty();
  const bool has_gpus = machine.rfind("gpu=none*0", 0) != 0;
  const bool has_word =
      is_one_host || value("NCCL_MNNVL_ENABLE") == "0" || !may_have_fabric(has_gpus);
  lines.set("DYNAMICCL_WORD", has_word ? "1" : "0");
  std::string arbiter;
  if (!start.is_rank && start.hosts == Hosts::kSeveral) {
    note(
        "this prepares one host, and the job has several: start each rank through dynamiccl-run, "
        "as in 'srun dynamiccl-run python train.py'");
  } else if (mode == "adaptive" || (mode != "observe" && (start.hosts == Hosts::kSeveral ||
                                                          !has_word || !by_hand.empty()))) {
    Words ends_with = {words[1]};
    if (words[2] != "0" && words[2] != "1") ends_with.push_back(words[2]);  // else no launcher
    if (why_no_key == nullptr) {
      arbiter = seek_arbiter(start, by_hand, key, words[0], ends_with);
    } else {
      note("ranks meet at their arbiter under a key, and " + key_file + " is none: " + why_no_key);
    }
  }
  lines.set("DYNAMICCL_ARBITER", arbiter);
  if (!start.name.empty()) lines.set("DYNAMICCL_JOB_ID", start.name);  // of recorded calls
  sweep_words();
  std::fputs(lines.text().c_str(), stdout);
  return 0;
}

}  // namespace
}  // namespace dynamiccl

int main(int count, char** arguments) {
  using namespace dynamiccl;
  const Words words(arguments + 1, arguments + count);
  if (!words.empty() && words[0] == "--facts") return print_facts({words.begin() + 1, words.end()});
  if (words.size() == 3) return prepare(words);
  std::fputs("usage: dynamiccl-prepare HOME COMMAND_PID LAUNCHER_PID\n", stderr);
  return kUsage;
}
