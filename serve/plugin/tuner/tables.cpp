// See tables.h.
#include "tuner/tables.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "identity/environment.h"
#include "identity/fingerprint.h"
#include "identity/index.h"
#include "platform/allocate.h"
#include "platform/threads.h"
#include "trusted/file.h"

namespace dynamiccl {
namespace {

constexpr std::size_t kProblemBytes = 300;

struct Kept {
  std::uint8_t hash[kDigestBytes];
  DecisionTable table;
  Kept* next;
};

Mutex g_mutex;
Kept* g_kept = nullptr;

struct Reading {
  char problem[kProblemBytes] = "";
  char artifact[2 * kDigestBytes + 1] = "none";
  char system[121] = "none";
  char table[2 * kDigestBytes + 1] = "none";
  const DecisionTable* decisions = nullptr;
};

#define DYNAMICCL_FAIL(...)                                                \
  do {                                                                     \
    std::snprintf(reading->problem, sizeof reading->problem, __VA_ARGS__); \
    return;                                                                \
  } while (false)

const DecisionTable* keep(const std::uint8_t* bytes, std::size_t size, const std::uint8_t* hash,
                          int nccl_version, const char** problem) noexcept {
  const Lock lock(&g_mutex);
  for (Kept* kept = g_kept; kept != nullptr; kept = kept->next) {
    if (std::memcmp(kept->hash, hash, kDigestBytes) == 0) return &kept->table;
  }
  auto* kept = allocate<Kept>();
  *problem = kept == nullptr ? "memory is short" : decode_table(bytes, size, &kept->table);
  if (*problem != nullptr) {
    deallocate(kept);
    return nullptr;
  }
  leave_out_what_no_job_may_ask(nccl_version, &kept->table);
  std::memcpy(kept->hash, hash, kDigestBytes);
  kept->next = g_kept;
  g_kept = kept;
  return &kept->table;
}

void read_artifact(std::size_t num_ranks, std::size_t num_nodes, int nccl_version,
                   PluginIndex* index, Reading* reading) noexcept {
  const char* artifact = value_of("DYNAMICCL_ARTIFACT");
  if (artifact == nullptr) DYNAMICCL_FAIL("DYNAMICCL_ARTIFACT is not set");
  char path[4096];
  TrustedFile directory;
  if (const char* reason = directory.open_directory(artifact)) {
    DYNAMICCL_FAIL("DYNAMICCL_ARTIFACT: %s", reason);
  }
  const char* kill_file = value_of("DYNAMICCL_KILL_FILE");
  std::snprintf(path, sizeof path, "%s/kill", artifact);
  const char* why_not = nullptr;
  if (exists_trusted(kill_file != nullptr ? kill_file : path, &why_not)) {
    DYNAMICCL_FAIL("a kill file is there");
  }
  std::snprintf(path, sizeof path, "%s/plugin.index", artifact);
  if (const char* reason = index->load(path)) DYNAMICCL_FAIL("plugin.index: %s", reason);
  to_hex(index->artifact_hash(), kDigestBytes, reading->artifact);
  const char* system = index->find_system(own_fingerprint());
  if (system == nullptr) {
    DYNAMICCL_FAIL("the artifact does not know this machine, %s; see 'dynamiccl-deploy bind'",
                   own_fingerprint());
  }
  std::snprintf(reading->system, sizeof reading->system, "%s", system);
  const char* wanted_system = value_of("DYNAMICCL_SYSTEM");
  if (wanted_system != nullptr && std::strcmp(wanted_system, system) != 0) {
    DYNAMICCL_FAIL("DYNAMICCL_SYSTEM is not what the artifact calls this machine");
  }
  std::uint8_t wanted[kDigestBytes], hash[kDigestBytes];
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
  Sha256 sha;
  sha.update(bytes, size);
  sha.finish(hash);
  to_hex(hash, kDigestBytes, reading->table);
  if (std::memcmp(hash, wanted, sizeof hash) != 0) {
    DYNAMICCL_FAIL("its table is not the one that plugin.index names");
  }
  const char* problem = nullptr;
  const DecisionTable* table = keep(bytes, size, hash, nccl_version, &problem);
  if (table == nullptr) DYNAMICCL_FAIL("its table: %s", problem);
  if (static_cast<std::size_t>(table->num_nodes) != num_nodes ||
      static_cast<std::size_t>(table->num_ranks) != num_ranks) {
    DYNAMICCL_FAIL("its table was made for another number of ranks or nodes");
  }
  reading->decisions = table;
}

#undef DYNAMICCL_FAIL

}  // namespace

void prepare(std::size_t num_ranks, std::size_t num_nodes, int nccl_version,
             Prepared* prepared) noexcept {
  Reading reading;
  auto* index = allocate<PluginIndex>();  // 64 KiB
  if (index == nullptr) {
    std::snprintf(reading.problem, sizeof reading.problem, "memory is short");
  } else {
    read_artifact(num_ranks, num_nodes, nccl_version, index, &reading);
  }
  deallocate(index);
  prepared->table = reading.decisions;
  std::snprintf(prepared->identity, sizeof prepared->identity,
                "problem=%s\nplugin=%s\nmachine=%s\nartifact=%s\nsystem=%s\ntable=%s\nranks=%zu\n"
                "nodes=%zu\nnccl=%d\n",
                reading.problem[0] != '\0' ? reading.problem : "none", kPluginVersion,
                own_fingerprint(), reading.artifact, reading.system, reading.table, num_ranks,
                num_nodes, nccl_version);
}

}  // namespace dynamiccl
