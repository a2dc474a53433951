// Implementation of tables.h.
#include "tuner/tables.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "build_digest.h"
#include "identity/environment.h"
#include "identity/fingerprint.h"
#include "identity/index.h"
#include "platform/allocate.h"
#include "platform/apart.h"
#include "platform/threads.h"
#include "trusted/file.h"

namespace dynamiccl {
namespace {

constexpr std::size_t kProblemBytes = 300;

struct Kept {
  char hash[kHexBytes];
  int nccl_version;  // what a table may ask for depends on it, and a process may have two
  DecisionTable table;
  Kept* next;
};

Mutex g_mutex;
Kept* g_kept = nullptr;

struct Reading {
  char problem[kProblemBytes] = "";
  char artifact[kHexBytes] = "none";
  char system[kSystemBytes] = "none";
  char file[kHexBytes] = "none";
  const DecisionTable* table = nullptr;
};

#define DYNAMICCL_FAIL(...)                                                \
  do {                                                                     \
    std::snprintf(reading->problem, sizeof reading->problem, __VA_ARGS__); \
    return;                                                                \
  } while (false)

/// The decoded table with this hash; null with a reason in `*problem` if it is invalid.
const DecisionTable* keep(const std::uint8_t* bytes, std::size_t size, const char* hash,
                          int nccl_version, const char** problem) noexcept {
  const Lock lock(&g_mutex);
  for (const Kept* kept = g_kept; kept != nullptr; kept = kept->next) {
    if (kept->nccl_version == nccl_version && std::strcmp(kept->hash, hash) == 0) {
      return &kept->table;
    }
  }
  auto* kept = allocate<Kept>();
  *problem = "memory is short";
  if (kept == nullptr) return nullptr;
  kept->nccl_version = nccl_version;
  std::memcpy(kept->hash, hash, sizeof kept->hash);
  *problem = decode_table(bytes, size, &kept->table);
  if (*problem != nullptr) {
    deallocate(kept);
    return nullptr;
  }
  leave_out_what_no_job_may_ask(nccl_version, &kept->table);
  kept->next = g_kept;
  g_kept = kept;
  return &kept->table;
}

void read_artifact(const NewCommunicator& shape, const char* fingerprint, PluginIndex* index,
                   Reading* reading) noexcept {
  const std::size_t num_ranks = shape.num_ranks, num_nodes = shape.num_nodes;
  const char* artifact = value_of("DYNAMICCL_ARTIFACT");
  if (artifact == nullptr) DYNAMICCL_FAIL("DYNAMICCL_ARTIFACT is not set");
  char path[4096];
  File directory;
  if (const char* reason = open_trusted_directory(artifact, &directory)) {
    DYNAMICCL_FAIL("DYNAMICCL_ARTIFACT: %s", reason);
  }
  const char* kill_file = value_of("DYNAMICCL_KILL_FILE");
  std::snprintf(path, sizeof path, "%s/kill", artifact);
  if (exists_trusted(kill_file != nullptr ? kill_file : path)) {
    DYNAMICCL_FAIL("a kill file is there");
  }
  std::snprintf(path, sizeof path, "%s/plugin.index", artifact);
  if (const char* reason = index->load(path)) DYNAMICCL_FAIL("plugin.index: %s", reason);
  std::memcpy(reading->artifact, index->artifact_hash(), sizeof reading->artifact);
  const char* system = reading->system;
  if (!index->find_system(fingerprint, reading->system)) {
    DYNAMICCL_FAIL("the artifact does not know this machine, %s; see 'dynamiccl-deploy bind'",
                   fingerprint);
  }
  const char* wanted_system = value_of("DYNAMICCL_SYSTEM");
  if (wanted_system != nullptr && std::strcmp(wanted_system, system) != 0) {
    DYNAMICCL_FAIL("DYNAMICCL_SYSTEM is not what the artifact calls this machine");
  }
  char wanted[kHexBytes];
  if (!index->table_hash(system, num_nodes, num_ranks, wanted)) {
    DYNAMICCL_FAIL("the artifact has no table for %zu ranks on %zu nodes of %s", num_ranks,
                   num_nodes, system);
  }
  std::snprintf(path, sizeof path, "%s/tables/%s/nodes%zu_ranks%zu.dct", artifact, system,
                num_nodes, num_ranks);
  std::uint8_t bytes[kMaxFileBytes];
  std::size_t size = 0;
  if (const char* reason = read_trusted(path, bytes, sizeof bytes, &size)) {
    DYNAMICCL_FAIL("its table: %s", reason);
  }
  sha256_hex(bytes, size, reading->file);
  if (std::strcmp(reading->file, wanted) != 0) {
    DYNAMICCL_FAIL("its table: not the one that plugin.index names");
  }
  const char* problem = nullptr;
  const DecisionTable* table = keep(bytes, size, reading->file, shape.nccl_version, &problem);
  if (problem != nullptr) DYNAMICCL_FAIL("its table: %s", problem);
  if (static_cast<std::size_t>(table->num_nodes) != num_nodes ||
      static_cast<std::size_t>(table->num_ranks) != num_ranks) {
    DYNAMICCL_FAIL("its table: made for another number of ranks or nodes");
  }
  reading->table = table;
}

#undef DYNAMICCL_FAIL

std::atomic<bool> g_was_late{false};

struct Preparation {
  NewCommunicator shape;
  char asked_first[128];
  Prepared prepared;

  static std::atomic<int> running;

  void run() noexcept;
};
std::atomic<int> Preparation::running{0};

void Preparation::run() noexcept {
  running.fetch_add(1);
#ifdef DYNAMICCL_TESTS
  std::uint64_t stall_s = 0;  // of a file system
  if (parse_number(value_of("DYNAMICCL_TEST_STALL_S"), &stall_s)) sleep_ns(stall_s * 1'000'000'000);
#endif
  char fingerprint[kFingerprintBytes];
  own_fingerprint(shape.nccl_version, fingerprint);
  Reading reading;
  auto* index = allocate<PluginIndex>();  // 64 KiB
  if (index == nullptr) {
    std::snprintf(reading.problem, sizeof reading.problem, "memory is short");
  } else {
    read_artifact(shape, fingerprint, index, &reading);
  }
  deallocate(index);
  prepared.table = reading.table;
  std::snprintf(prepared.identity, sizeof prepared.identity,
                "problem=%s\nplugin=%s %s\nmachine=%s\nartifact=%s\nsystem=%s\ntable=%s\n"
                "ranks=%zu\nnodes=%zu\nnccl=%d\nasked first=%s\n",
                reading.problem[0] != '\0' ? reading.problem : "none", kPluginVersion,
                kSourceDigest, fingerprint, reading.artifact, reading.system, reading.file,
                shape.num_ranks, shape.num_nodes, shape.nccl_version, asked_first);
  running.fetch_sub(1);
}

}  // namespace

void prepare_objection(const char* problem, Prepared* prepared) noexcept {
  *prepared = Prepared{};
  std::snprintf(prepared->identity, sizeof prepared->identity, "problem=%s\n", problem);
}

void prepare(const NewCommunicator& shape, std::uint64_t limit_ms, Prepared* prepared) noexcept {
  // If an earlier attempt still hangs in a file system, do not start another one.
  if (g_was_late.load() && Preparation::running.load() > 0) {
    return prepare_objection("its files could not be read in time before", prepared);
  }
  Preparation preparation = {shape, {}, {}};
  std::snprintf(preparation.asked_first, sizeof preparation.asked_first, "%s", shape.asked_first);
  const bool in_time = run_apart(&preparation, "dynamiccl-read", limit_ms);
  g_was_late.store(!in_time);
  *prepared = preparation.prepared;
  if (!in_time) {
    prepare_objection("its files (artifact, kill file, /proc, /sys) could not be read in time",
                      prepared);
  }
}

}  // namespace dynamiccl
