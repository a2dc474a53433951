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
  bool is_table;
  union {
    DecisionTable table;
    TunerConstants constants;
  };
  Kept* next;
};

Mutex g_mutex;
Kept* g_kept = nullptr;

struct Reading {
  char problem[kProblemBytes] = "";
  char artifact[2 * kDigestBytes + 1] = "none";
  char system[121] = "none";
  char file[2 * kDigestBytes + 1] = "none";
  const Kept* kept = nullptr;
};

#define DYNAMICCL_FAIL(...)                                                \
  do {                                                                     \
    std::snprintf(reading->problem, sizeof reading->problem, __VA_ARGS__); \
    return;                                                                \
  } while (false)

/// A file of an artifact: a table, or constants.
struct Read {
  const std::uint8_t* bytes;
  std::size_t size;
  const std::uint8_t* hash;
  bool is_table;
};

const char* decode(const Read& file, int nccl_version, Kept* kept) noexcept {
  kept->is_table = file.is_table;
  if (!file.is_table) return decode_constants(file.bytes, file.size, &kept->constants);
  if (const char* problem = decode_table(file.bytes, file.size, &kept->table)) return problem;
  leave_out_what_no_job_may_ask(nccl_version, &kept->table);
  return nullptr;
}

const Kept* keep(const Read& file, int nccl_version, const char** problem) noexcept {
  const Lock lock(&g_mutex);
  for (const Kept* kept = g_kept; kept != nullptr; kept = kept->next) {
    if (kept->is_table == file.is_table && std::memcmp(kept->hash, file.hash, kDigestBytes) == 0) {
      return kept;
    }
  }
  auto* kept = allocate<Kept>();
  *problem = kept == nullptr ? "memory is short" : decode(file, nccl_version, kept);
  if (*problem != nullptr) {
    deallocate(kept);
    return nullptr;
  }
  std::memcpy(kept->hash, file.hash, kDigestBytes);
  kept->next = g_kept;
  g_kept = kept;
  return kept;
}

void read_artifact(std::size_t num_ranks, std::size_t num_nodes, int nccl_version,
                   const ncclTunerConstants_v5_t* own, PluginIndex* index,
                   Reading* reading) noexcept {
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
  const bool is_table = !index->file_hash("constants", system, num_nodes, num_ranks, wanted);
  if (is_table && !index->file_hash("table", system, num_nodes, num_ranks, wanted)) {
    DYNAMICCL_FAIL("the artifact has no table for %zu ranks on %zu nodes of %s", num_ranks,
                   num_nodes, system);
  }
  const char* what = is_table ? "its table" : "its constants";
  std::snprintf(path, sizeof path, "%s/%s/%s/nodes%zu_ranks%zu.%s", artifact,
                is_table ? "tables" : "constants", system, num_nodes, num_ranks,
                is_table ? "dct" : "dcc");
  std::uint8_t bytes[kMaxFileBytes];
  std::size_t size = 0;
  if (const char* reason = read_trusted(path, bytes, sizeof bytes, &size)) {
    DYNAMICCL_FAIL("%s: %s", what, reason);
  }
  Sha256 sha;
  sha.update(bytes, size);
  sha.finish(hash);
  to_hex(hash, kDigestBytes, reading->file);
  if (std::memcmp(hash, wanted, sizeof hash) != 0) {
    DYNAMICCL_FAIL("%s: not the one that plugin.index names", what);
  }
  const char* problem = nullptr;
  const Kept* kept = keep({bytes, size, hash, is_table}, nccl_version, &problem);
  if (problem != nullptr) DYNAMICCL_FAIL("%s: %s", what, problem);
  const std::int32_t nodes = is_table ? kept->table.num_nodes : kept->constants.num_nodes;
  const std::int32_t ranks = is_table ? kept->table.num_ranks : kept->constants.num_ranks;
  if (static_cast<std::size_t>(nodes) != num_nodes ||
      static_cast<std::size_t>(ranks) != num_ranks) {
    DYNAMICCL_FAIL("%s: made for another number of ranks or nodes", what);
  }
  if (!is_table) problem = problem_with(kept->constants, own);
  if (problem != nullptr) DYNAMICCL_FAIL("%s: %s", what, problem);
  reading->kept = kept;
}

#undef DYNAMICCL_FAIL

}  // namespace

void prepare(std::size_t num_ranks, std::size_t num_nodes, int nccl_version,
             const ncclTunerConstants_v5_t* own, Prepared* prepared) noexcept {
  Reading reading;
  auto* index = allocate<PluginIndex>();  // 64 KiB
  if (index == nullptr) {
    std::snprintf(reading.problem, sizeof reading.problem, "memory is short");
  } else {
    read_artifact(num_ranks, num_nodes, nccl_version, own, index, &reading);
  }
  deallocate(index);
  if (reading.kept != nullptr) {
    const Kept& kept = *reading.kept;
    prepared->table = kept.is_table ? &kept.table : nullptr;
    prepared->constants = kept.is_table ? nullptr : &kept.constants;
  }
  std::snprintf(prepared->identity, sizeof prepared->identity,
                "problem=%s\nplugin=%s\nmachine=%s\nartifact=%s\nsystem=%s\ntable=%s\nranks=%zu\n"
                "nodes=%zu\nnccl=%d\n",
                reading.problem[0] != '\0' ? reading.problem : "none", kPluginVersion,
                own_fingerprint(), reading.artifact, reading.system, reading.file, num_ranks,
                num_nodes, nccl_version);
}

}  // namespace dynamiccl
