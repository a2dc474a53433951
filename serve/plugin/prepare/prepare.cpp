// dynamiccl-prepare: what a rank must know before it loads the plugin.
//
//   dynamiccl-prepare ARBITER PIDS         lines for a shell (dynamiccl-run)
//   dynamiccl-prepare --facts [ARTIFACT]   a line of JSON (dynamiccl-deploy)
//
// The first form never fails a job: what keeps its ranks from using a table becomes
// DYNAMICCL_PROBLEM. Exit code of the second: 0; 2 wrong usage; 3 the artifact cannot be used; 4
// the machine cannot be named.
#include <dlfcn.h>
#include <glob.h>
#include <limits.h>
#include <netdb.h>
#include <strings.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "agree/caller.h"
#include "platform/system.h"
#include "programs.h"
#include "vocabulary.h"

namespace dynamiccl {
namespace {

using Words = std::vector<std::string>;

constexpr int kUsage = 2, kBadArtifact = 3, kBadMachine = 4;
constexpr const char* kNoMachine = "a GPU or NIC of this machine cannot be read in /proc or /sys";

// --- This machine ---------------------------------------------------------------------------

/// What fits with ";nccl=12345" into the 200 characters of dynamiccl/libraries.py, and more than
/// any model's name has.
constexpr std::size_t kMostBytes = 189, kMostNameBytes = 95;

/// The files of the kernel that match a pattern.
Words files(const char* pattern) {
  std::string root;
#ifdef DYNAMICCL_TESTS
  root = text_of("DYNAMICCL_TEST_ROOT");
#endif
  glob_t found = {};
  glob((root + pattern).c_str(), GLOB_NOSORT, nullptr, &found);
  const Words paths(found.gl_pathv, found.gl_pathv + found.gl_pathc);
  globfree(&found);
  return paths;
}

/// The beginning of a file; empty when it cannot be read.
std::string read_text(const std::string& path) {
  std::string text(2048, '\0');
  const File file(path.c_str());
  const ssize_t size = file.read_all(text.data(), text.size());
  text.resize(size > 0 ? static_cast<std::size_t>(size) : 0);
  return text.erase(text.find_last_not_of(" \t\r\n") + 1);
}

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

/// The value of `key` in the driver's information file; empty where it is missing.
std::string field(const std::string& text, const std::string& key) {
  const std::size_t at = ("\n" + text).find("\n" + key);
  if (at == std::string::npos) return "";
  const std::string line = text.substr(at + key.size(), text.find('\n', at) - at - key.size());
  const std::size_t from = std::min(line.find_first_not_of(" \t"), line.size());
  return line.substr(from, line.find_last_not_of(" \t") + 1 - from);
}

/// The GPUs by model, "none*0" without one; empty when one has no readable model.
std::string find_gpus() {
  std::map<std::string, int> models;
  for (const std::string& gpu : files("/proc/driver/nvidia/gpus/*")) {
    const std::string text = read_text(gpu + "/information");
    if (field(text, "GPU Excluded:") == "Yes") continue;  // the driver keeps it from everybody
    std::string model = field(text, "Model:");
    if (model.empty() || model.size() > kMostNameBytes) return "";
    // Punctuation of the fingerprint or of JSON becomes '_'.
    for (char& c : model) {
      if (c < ' ' || c > '~' || std::strchr(";*+=\"\\", c) != nullptr) c = '_';
    }
    ++models[model];
  }
  std::string gpus;
  for (const auto& [model, count] : models) {
    gpus += (gpus.empty() ? "" : "+") + model + "*" + std::to_string(count);
  }
  return gpus.empty() ? "none*0" : gpus;
}

/// "400 Gb/sec (4X NDR)" -> 400, "2.5 Gb/sec" -> 2.5; 0 for anything else, such as "-1".
double rate_of(const std::string& text) {
  if (text[0] < '0' || text[0] > '9') return 0.0;
  char* end;
  const double rate = std::strtod(text.c_str(), &end);
  return *end == ' ' || *end == '\0' ? rate : 0.0;
}

/// The fastest active RDMA ports, which NCCL would use; without one, the fastest sockets.
std::string find_nics() {
  std::map<std::pair<double, std::string>, int> found;
  for (const std::string& port : files("/sys/class/infiniband/*/ports/*")) {
    if (!ends_with(read_text(port + "/state"), ": ACTIVE")) continue;
    char driver[PATH_MAX] = "";
    const std::string link = port + "/../../device/driver";
    [[maybe_unused]] const ssize_t size = readlink(link.c_str(), driver, sizeof driver - 1);
    const std::string layer = read_text(port + "/link_layer");  // EFA has none
    const char* plain = strcasecmp(layer.c_str(), "ethernet") == 0 ? "roce" : "infiniband";
    ++found[{rate_of(read_text(port + "/rate")), ends_with(driver, "/efa") ? "efa" : plain}];
  }
  // Devices with hardware, or, where none has, all but lo.
  for (const bool with_hardware : {true, false}) {
    if (!found.empty()) break;
    // Ends in "/.": bonding_masters is a file beside the devices.
    for (const std::string& device : files("/sys/class/net/*/.")) {
      if (ends_with(device, "/lo/.")) continue;
      if (with_hardware && access((device + "/device").c_str(), F_OK) != 0) continue;
      ++found[{rate_of(read_text(device + "/speed")), "socket"}];
    }
  }
  if (found.empty()) return "none*0";
  const auto& [kind, count] = *found.rbegin();
  return kind.second + "*" + std::to_string(count);
}

/// The fingerprint of this machine without NCCL's release, which must be equal on all ranks, for
/// example `gpu=NVIDIA H100 80GB HBM3*8;mig=0;nic=infiniband*8`, from the kernel's files, without a
/// CUDA call. Empty where something that is there could not be read or named, so that a guess never
/// passes for a fact. collect/nodes.py has the same rules: the two must agree.
std::string take_fingerprint() {
  const std::string gpus = find_gpus();
  // The driver lists gpu<N>/mig/gi<M> for each instance of a GPU that is divided (NVIDIA MIG User
  // Guide, "Device Nodes and Capabilities").
  const bool has_mig = !files("/proc/driver/nvidia/capabilities/gpu*/mig/gi*").empty();
  const std::string text = "gpu=" + gpus + (has_mig ? ";mig=1;nic=" : ";mig=0;nic=") + find_nics();
  return gpus.empty() || text.size() > kMostBytes ? "" : text;
}

/// Whether ranks of one nNodes may be on several hosts: NCCL joins those that one NVLink fabric
/// connects, GPUs of one cluster (2.30.7 src/mnnvl.cc). In doubt they may.
bool may_have_fabric(bool has_gpus) {
  // nvml.h: NVML_INIT_FLAG_NO_ATTACH; NVML_ERROR_NOT_SUPPORTED; nvmlGpuFabricInfo_t.
  constexpr unsigned kNoAttach = 2;
  constexpr int kNotSupported = 3, kInfoBytes = 28, kClusterBytes = 16;
  void* nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
  if (nvml == nullptr) return has_gpus;
  // What a function returns, 0 on success; -1 where there is none of that name.
  const auto call = [nvml](const char* name, auto... arguments) {
    const auto function = reinterpret_cast<int (*)(decltype(arguments)...)>(dlsym(nvml, name));
    return function != nullptr ? function(arguments...) : -1;
  };
  unsigned num_gpus = 0;
  if (call("nvmlInitWithFlags", kNoAttach) != 0) return true;
  if (call("nvmlDeviceGetCount_v2", &num_gpus) != 0) return true;
  for (unsigned i = 0; i < num_gpus; ++i) {
    void* gpu = nullptr;
    unsigned char info[kInfoBytes] = {};
    if (call("nvmlDeviceGetHandleByIndex_v2", i, &gpu) != 0) return true;
    const int code = call("nvmlDeviceGetGpuFabricInfo", gpu, info);
    if (code != 0 && code != kNotSupported) return true;
    if (std::count(info, info + kClusterBytes, 0) != kClusterBytes) return true;
  }
  return false;
}

// --- The artifact ---------------------------------------------------------------------------

struct Artifact {
  std::string directory;     // without links
  std::uint64_t digest = 0;  // of plugin.index: the ranks compare it
  std::string systems;       // what it calls this machine by NCCL's release: "22809=box 23007=box"
  std::string problem;       // why nothing of it may be used; empty: nothing
};

/// A system's name becomes part of a path.
bool is_name(const std::string& name) {
  return !name.empty() && name.find_first_of("._-") != 0 &&
         name.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789._-") == std::string::npos;
}

/// The key of a job's messages, of all bytes of a file. Null, or why not.
const char* read_key(const std::string& path, Key* key) {
  std::string text;
  if (const char* why = read_ours(path, 4096, &text, S_IRWXG | S_IRWXO)) return why;
  if (text.size() < 16) return "it is shorter than 16 bytes";
  *key = {siphash({0, 1}, text.data(), text.size()), siphash({0, 2}, text.data(), text.size())};
  return nullptr;
}

Artifact read_artifact(const std::string& named, const std::string& machine) {
  Artifact artifact;
  std::string text;
  char path[PATH_MAX] = "";
  const char* why = "there is no such file";
  if (realpath(named.c_str(), path) != nullptr) {
    artifact.directory = path;
    why = read_ours(artifact.directory + "/plugin.index", kMostIndexBytes, &text);
  }
  if (why == nullptr && (text.empty() || text.back() != '\n')) why = "it is cut off";
  if (why == nullptr && text.rfind(kIndexVersion, 0) != 0) {
    why = "it is not a DynamICCL index of format version 1";
  }
  if (why != nullptr) {
    artifact.problem = why;
    return artifact;
  }
  artifact.digest = siphash({}, text.data(), text.size());
  std::map<std::string, std::string> systems;  // one that has two names is known by neither
  const std::string here = "\t" + machine + ";nccl=";
  for (std::size_t next = 0, end; next < text.size(); next = end + 1) {
    end = text.find('\n', next);
    const std::string line = text.substr(next, end - next);
    const std::size_t at = line.find(here);
    if (line.rfind("system\t", 0) != 0 || at == std::string::npos) continue;
    const std::string name = line.substr(7, at - 7), nccl = line.substr(at + here.size());
    if (!is_name(name) || nccl.find_first_not_of("0123456789") != std::string::npos) continue;
    const auto [known, is_new] = systems.emplace(nccl, name);
    if (!is_new && known->second != name) known->second = "";
  }
  const std::string wanted = text_of("DYNAMICCL_SYSTEM");
  for (const auto& [nccl, system] : systems) {
    if (system.empty() || (!wanted.empty() && system != wanted)) continue;
    artifact.systems += (artifact.systems.empty() ? "" : " ") + nccl + "=" + system;
  }
  return artifact;
}

int print_facts(const std::string& named) {
  const std::string machine = take_fingerprint();
  const Artifact artifact = named.empty() ? Artifact{} : read_artifact(named, machine);
  const std::string key_file = text_of("DYNAMICCL_KEY_FILE");
  Key key;
  const char* key_problem = key_file.empty() ? nullptr : read_key(key_file, &key);
  // No text in the index needs an escape in JSON.
  std::printf(R"({"machine": "%s", "machine_problem": "%s", "systems": "%s", )"
              R"("artifact_problem": "%s", "key_problem": "%s"})"
              "\n",
              machine.c_str(), machine.empty() ? kNoMachine : "", artifact.systems.c_str(),
              artifact.problem.c_str(), key_problem != nullptr ? key_problem : "");
  if (machine.empty()) return kBadMachine;
  return artifact.problem.empty() ? 0 : kBadArtifact;
}

// --- What launchers say ---------------------------------------------------------------------
//
// torchrun (RANK, LOCAL_WORLD_SIZE, TORCHELASTIC_RUN_ID), Open MPI (OMPI_*), Slurm (SLURM_*), PMI
// and PMIx, Kubernetes (JOB_COMPLETION_INDEX: one rank a pod), and what users set
// (docs/environment.md).

/// What they say of this process and its job.
struct Start {
  std::string name;                                // of the job, equal on all its ranks
  std::uint64_t id = 0;                            // hash of it and of the attempt, never 0
  bool has_one_host = false, has_several = false;  // neither: not known
  bool is_rank = false;                            // rather than what starts the ranks
  bool is_first = false;                           // whoever starts the arbiter
  std::string host;  // where that is, as the launcher calls it; empty: not known
};

/// The first host of a Slurm list such as n[03-05,9],m1. A container has no scontrol to ask.
std::string first_of_list(const std::string& list) {
  std::string name;
  for (std::size_t at = 0; at < list.size() && list[at] != ','; ++at) {
    if (list[at] != '[') {
      name += list[at];
      continue;
    }
    name += list.substr(at + 1, list.find_first_of(",-]", at) - at - 1);
    at = std::min(list.find(']', at), list.size() - 1);
  }
  return name;
}

struct Rank {
  std::string number, size, local_size;  // empty: not told
};

/// As which rank a launcher started this process; the innermost launcher comes first.
Rank find_rank(bool by_srun) {
  const bool is_first = text_of("SLURM_NODEID") == "0" && text_of("SLURM_LOCALID") == "0";
  const Rank told[] = {
      {text_of("RANK"), text_of("WORLD_SIZE"), text_of("LOCAL_WORLD_SIZE")},
      {text_of("OMPI_COMM_WORLD_RANK"), text_of("OMPI_COMM_WORLD_SIZE"),
       text_of("OMPI_COMM_WORLD_LOCAL_SIZE")},
      {by_srun ? (is_first ? "0" : "1") : "", "", ""},
      {text_of("PMI_RANK"), text_of("PMI_SIZE"), text_of("MPI_LOCALNRANKS")},
      {text_of("PMIX_RANK"), "", ""},
      {text_of("JOB_COMPLETION_INDEX"), "", ""},
  };
  for (const Rank& rank : told) {
    if (!rank.number.empty()) return rank;
  }
  return {};
}

Start find_start() {
  Start start;
  // A script, or the shell of salloc, is a step whose number has ten digits. And orted is no rank.
  const std::string step = text_of("SLURM_STEP_ID");
  const bool by_srun = !step.empty() && step.size() < 10 && text_of("OMPI_COMM_WORLD_RANK").empty();
  const auto of_slurm = [by_srun](const char* of_step, const char* of_job) {
    const std::string own = by_srun ? text_of(of_step) : "";
    return own.empty() ? text_of(of_job) : own;
  };
  const Rank rank = find_rank(by_srun);
  start.is_rank = !rank.number.empty();
  start.is_first = !start.is_rank || rank.number == "0";
  const std::string nodes = of_slurm("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES");
  if (!rank.size.empty() && !rank.local_size.empty()) {
    start.has_one_host = rank.size == rank.local_size;
  } else {
    start.has_one_host = nodes == "1" && text_of("SLURM_HET_SIZE").empty();
  }
  start.has_several = !start.has_one_host && (start.is_rank || !nodes.empty());
  start.host = text_of("MASTER_ADDR");
  if (start.host.empty()) {
    start.host = first_of_list(of_slurm("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"));
  }
  if (start.host.empty() && !start.has_several) start.host = "127.0.0.1";

  // Not TORCHELASTIC_RESTART_COUNT: each agent counts the failures of its own processes. Not
  // MASTER_ADDR: rank 0 may know its host by another name. Two jobs of one name are no harm: the
  // ids of their communicators are drawn.
  Words names = {text_of("DYNAMICCL_JOB_ID")};
  const std::string torch = text_of("TORCHELASTIC_RUN_ID"), slurm = text_of("SLURM_JOB_ID");
  const bool has_step = by_srun && torch.empty();  // of agents each may have a step of its own
  if (names[0].empty()) {
    names = {slurm, has_step ? step : "", text_of("MASTER_PORT"), torch == "none" ? "" : torch};
    for (const char* name : {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID"}) {
      if (torch.empty()) names.push_back(text_of(name));
    }
  } else if (has_step && names[0] == slurm) {
    names.push_back(step);  // `dynamiccl-run srun ... &`, twice
  }
  for (const std::string& name : names) {
    if (!name.empty()) start.name += (start.name.empty() ? "" : ".") + name;
  }
  if (start.name.empty() && !start.is_rank) start.name = std::to_string(draw());
  const char* restart = value_of("DYNAMICCL_RESTART", value_of("SLURM_RESTART_COUNT", ""));
  const std::string attempt = start.name + '\n' + restart;
  start.id = fnv1a(attempt.data(), attempt.size()) | 1;
  return start;
}

// --- What dynamiccl-run evaluates -----------------------------------------------------------

std::string quoted(const std::string& text) {
  std::string quoted = "'";
  for (const char c : text) quoted += c == '\'' ? "'\\''" : std::string(1, c);
  return quoted + "'";
}

/// Has the shell set a variable, and sets it here too: the arbiter inherits it. An empty value
/// unsets it: it may be left of another dynamiccl-run.
void set(const char* name, const std::string& text) {
  if (text.empty()) {
    unsetenv(name);
    std::printf("unset %s\n", name);
  } else {
    setenv(name, text.c_str(), 1);
    std::printf("export %s=%s\n", name, quoted(text).c_str());
  }
}

void note(const std::string& text) { std::fprintf(stderr, "dynamiccl-run: %s\n", text.c_str()); }

// --- The arbiter ----------------------------------------------------------------------------

/// The address, if our arbiter answers at HOST:PORT or [IPV6]:PORT; empty where it does not. It is
/// asked by a vote of communicator 0, which none is, with a problem: an arbiter has no table for
/// that, and says so under the key.
std::string ask(std::uint64_t job, const Key& key, const std::string& endpoint) {
  constexpr std::uint64_t kPatienceMs = 1'000;
  Vote hello;
  hello.num_ranks = 2;
  hello.round.job = job;
  hello.nonce = draw();
  hello.problem[0] = '?';
  const std::size_t colon = endpoint.rfind(':');
  std::string named = endpoint.substr(0, colon), found;
  if (named[0] == '[' && named.back() == ']') named = named.substr(1, named.size() - 2);
  addrinfo kind = {}, *list = nullptr;
  kind.ai_socktype = SOCK_STREAM;
  if (getaddrinfo(named.c_str(), &endpoint[colon + 1], &kind, &list) != 0) return "";
  for (const addrinfo* to = list; to != nullptr && found.empty(); to = to->ai_next) {
    char host[NI_MAXHOST] = "", port[NI_MAXSERV] = "";
    const int error = getnameinfo(to->ai_addr, to->ai_addrlen, host, sizeof host, port, sizeof port,
                                  NI_NUMERICHOST | NI_NUMERICSERV);
    const bool is_six = to->ai_family == AF_INET6;
    const std::string address =
        (is_six ? "[" : "") + std::string(host) + (is_six ? "]:" : ":") + port;
    Arbiter arbiter;
    arbiter.key = key;
    // fe80::1%eth0, which is no address to us, is another one on the next host.
    if (error != 0 || !parse_address(address.c_str(), &arbiter)) continue;
    Exchange exchange;
    agree_by_arbiter(arbiter, hello, limits_of_job(), kPatienceMs, &exchange);
    if (exchange.heard == ReplyKind::kAbstain) found = address;
  }
  freeaddrinfo(list);
  return found;
}

/// What threads have found. They outlive a search that waits for no name server any longer.
struct Search {
  std::mutex mutex;
  std::string found;
  std::size_t num_tried = 0;
};

/// The address of our arbiter; empty: none. All endpoints are tried side by side, again and again
/// until the limit; with a limit of 0 once, for a second. An accepted connection is no answer,
/// since a service mesh accepts for the dead; nor is a port that says nothing, or another job's
/// arbiter.
std::string find_arbiter(std::uint64_t job, const Key& key, const Words& endpoints,
                         std::uint64_t limit_ms) {
  constexpr std::uint64_t kLeastMs = 1'000, kPauseNs = 100'000'000, kLookNs = 1'000'000;
  const std::uint64_t until_ms = monotonic_ms() + std::max(limit_ms, kLeastMs);
  const auto search = std::make_shared<Search>();
  for (const std::string& endpoint : endpoints) {
    const auto search_at = [=] {
      for (bool goes_on = true; goes_on; sleep_ns(kPauseNs)) {
        const std::string found = ask(job, key, endpoint);
        const std::lock_guard<std::mutex> lock(search->mutex);
        if (search->found.empty()) search->found = found;
        ++search->num_tried;
        goes_on = limit_ms > 0 && search->found.empty();
      }
    };
    std::thread(search_at).detach();
  }
  for (;; sleep_ns(kLookNs)) {
    const std::lock_guard<std::mutex> lock(search->mutex);
    const bool is_over = limit_ms == 0 && search->num_tried == endpoints.size();
    if (!search->found.empty() || is_over || monotonic_ms() >= until_ms) return search->found;
  }
}

/// What DYNAMICCL_ARBITER is to be; empty: none. Starts one where this is the first rank's host and
/// none answers yet: that of a rank which its launcher has started again goes on.
std::string seek_arbiter(const Start& start, const std::string& by_hand, const Key& key,
                         const std::string& program, const std::string& pids) {
  constexpr const char* kNoHost =
      "the host of rank 0 is not known here: set MASTER_ADDR, or DYNAMICCL_ARBITER=HOST:PORT, for "
      "all ranks";
  const bool has_host = !start.host.empty() || !by_hand.empty();
  if (!has_host && start.is_first) note(kNoHost);
  if (!has_host) return "";
  const bool may_start = start.is_first && (start.is_rank || by_hand.empty());
  const std::string host = may_start ? "127.0.0.1" : start.host;
  Words ports, endpoints;  // where it may be: the first may be somebody else's
  for (std::uint64_t purpose = 1; purpose <= 3; ++purpose) {
    // Below those that systems give out themselves (from 32768), above the well-known ones.
    ports.push_back(std::to_string(20'000 + (start.id + purpose * 0x9e3779b97f4a7c15U) % 12'000));
    if (!start.host.empty()) endpoints.push_back(host + ":" + ports.back());
  }
  if (!by_hand.empty()) endpoints.push_back(by_hand);
  if (may_start && find_arbiter(start.id, key, endpoints, 0).empty()) {
    // It puts itself into the background. What it prints, its port, is not for the shell that
    // evaluates our output; why it cannot listen is told of the last port.
    const auto fails = [&](const std::string& port) {
      const char* quiet = port == ports.back() ? " > /dev/null" : " > /dev/null 2>&1";
      return std::system((program + " " + port + " " + pids + quiet).c_str()) != 0;
    };
    if (std::all_of(ports.begin(), ports.end(), fails)) return "";
  }
  std::string tried, found = find_arbiter(start.id, key, endpoints, limits_of_job().vote_ms);
  if (!found.empty()) return found;
  for (const std::string& endpoint : endpoints) tried += " " + endpoint;
  note("no arbiter of this job answers at" + tried + ": where ranks need one NCCL's own choice " +
       "stands; DYNAMICCL_ARBITER=HOST:PORT names another");
  return "";
}

/// `program`: the arbiter's; `pids`: the processes with the last of which it ends.
int prepare(const std::string& program, const std::string& pids) {
  alarm(25);  // seconds: a driver that answers no more must not keep a job from starting
  const Start start = find_start();
  const std::string by_hand = text_of("DYNAMICCL_ARBITER"), mode = text_of("DYNAMICCL_MODE");
  set("DYNAMICCL_JOB", hex_of(start.id));
  if (!start.name.empty()) set("DYNAMICCL_JOB_ID", start.name);  // of recorded calls

  const std::string named = text_of("DYNAMICCL_ARTIFACT"), wanted = text_of("DYNAMICCL_SYSTEM");
  const std::string kill_file = text_of("DYNAMICCL_KILL_FILE"), machine = take_fingerprint();
  const Artifact artifact = read_artifact(named, machine);
  set("DYNAMICCL_MACHINE", machine);
  set("DYNAMICCL_SYSTEMS", artifact.systems);
  set("DYNAMICCL_INDEX", artifact.digest != 0 ? hex_of(artifact.digest) : "");
  set("DYNAMICCL_TABLES", artifact.systems.empty() ? "" : artifact.directory + "/tables");
  std::string problem;
  if (!artifact.problem.empty()) {
    problem = "the artifact's index: " + artifact.problem + ", " + named +
              "/plugin.index; see 'dynamiccl-deploy doctor'";
  } else if (machine.empty()) {
    problem = kNoMachine;
  } else if (artifact.systems.empty()) {
    problem = "the artifact does not know this machine" +
              (wanted.empty() ? "" : " as DYNAMICCL_SYSTEM=" + wanted) + ", " + machine +
              "; see 'dynamiccl-deploy bind'";
  }
  set("DYNAMICCL_PROBLEM", problem);
  if (mode != "observe" && start.is_first) {  // not all of a thousand
    const std::string stands = "NCCL's own choice stands";
    if (!problem.empty()) note(stands + ": " + problem);
    if (may_exist(kill_file.c_str())) note(stands + " while " + kill_file + " is there");
  }

  Key key;
  const std::string key_file = text_of("DYNAMICCL_KEY_FILE");
  const char* why_no_key = read_key(key_file, &key);
  set("DYNAMICCL_KEY", why_no_key == nullptr ? hex_of(key.halves[0]) + hex_of(key.halves[1]) : "");
  const bool has_gpus = machine.rfind("gpu=none*0", 0) != 0;
  const bool has_word = (start.has_one_host && by_hand.empty()) ||
                        text_of("NCCL_MNNVL_ENABLE") == "0" || !may_have_fabric(has_gpus);
  set("DYNAMICCL_WORD", has_word ? "1" : "0");
  std::string arbiter;
  if (!start.is_rank && start.has_several) {
    note(
        "this prepares one host, and the job has several: start each rank through dynamiccl-run, "
        "as in 'srun dynamiccl-run python train.py'");
  } else if (mode == "adaptive" ||
             (mode != "observe" && (start.has_several || !has_word || !by_hand.empty()))) {
    if (why_no_key == nullptr) {
      arbiter = seek_arbiter(start, by_hand, key, quoted(program), pids);
    } else {
      note("ranks meet at their arbiter under a key, and " + key_file + " is none: " + why_no_key);
    }
  }
  set("DYNAMICCL_ARBITER", arbiter);
  return 0;
}

}  // namespace
}  // namespace dynamiccl

int main(int count, char** arguments) {
  using namespace dynamiccl;
  const Words words(arguments + 1, arguments + count);
  const bool are_two = words.size() == 2 && words[1][0] != '-';
  if (words == Words{"--facts"}) return print_facts("");
  if (are_two && words[0] == "--facts") return print_facts(words[1]);
  if (are_two && words[0][0] != '-') return prepare(words[0], words[1]);
  std::fputs("usage: dynamiccl-prepare ARBITER PIDS | --facts [ARTIFACT]\n", stderr);
  return kUsage;
}
