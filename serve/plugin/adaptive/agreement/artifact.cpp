// Runs on the files' thread: reading files and taking the fingerprint can be slow.
#include "adaptive/agreement/artifact.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "identity/environment.h"
#include "platform/allocate.h"
#include "platform/loaded_nccl.h"
#include "table.h"
#include "trusted/file.h"

namespace dynamiccl {
namespace {

constexpr std::size_t kMaxPathBytes = 4096;
constexpr std::uint64_t kMaxPartsPerMillion = 1'000'000'000;

/// 64 KiB: too large for a thread's stack.
class HeldIndex {
 public:
  HeldIndex() noexcept : index_(allocate<PluginIndex>()) {}
  ~HeldIndex() { deallocate(index_); }
  HeldIndex(const HeldIndex&) = delete;
  HeldIndex& operator=(const HeldIndex&) = delete;
  PluginIndex* get() const noexcept { return index_; }

 private:
  PluginIndex* index_;
};

/// Relative difference between repeats of one call; -1: unknown.
std::int64_t noise_ppm_of(const PluginIndex& index, const char* system, int collective) noexcept {
  char keys[kSystemBytes + 32], text[16];
  std::snprintf(keys, sizeof keys, "noise\t%s\t%d\t", system, collective);
  std::uint64_t ppm = 0;
  const bool is_known =
      index.find(keys, text, sizeof text) && parse_number(text, &ppm) && ppm <= kMaxPartsPerMillion;
  return is_known ? static_cast<std::int64_t>(ppm) : -1;
}

}  // namespace

void Artifact::load(const Settings& settings, const Member::Place& place) noexcept {
  const char* reason = read(settings, place);
  if (reason != nullptr && problem_[0] == '\0') {
    std::snprintf(problem_, sizeof problem_, "%s", reason);
  }
}

const char* Artifact::read(const Settings& settings, const Member::Place& place) noexcept {
  if (settings.artifact == nullptr) return "DYNAMICCL_ARTIFACT is not set";
  const HeldIndex held;
  PluginIndex* index = held.get();
  if (index == nullptr) return "memory is short";
  char path[kMaxPathBytes];
  File directory;
  if (const char* reason = open_trusted_directory(settings.artifact, &directory)) {
    std::snprintf(problem_, sizeof problem_, "DYNAMICCL_ARTIFACT: %s", reason);
    return problem_;
  }
  const int length = std::snprintf(path, sizeof path, "%s/plugin.index", settings.artifact);
  if (length < 0 || static_cast<std::size_t>(length) >= sizeof path) return "its path is too long";
  if (const char* reason = index->load(path)) {
    std::snprintf(problem_, sizeof problem_, "plugin.index: %s", reason);
    return problem_;
  }
  std::memcpy(hash_, index->artifact_hash(), sizeof hash_);
  char machine[kFingerprintBytes];
  own_fingerprint(loaded_nccl_version(), machine);
  if (!index->find_system(machine, system_)) {
    std::snprintf(problem_, sizeof problem_,
                  "the artifact does not know this machine, %s; see 'dynamiccl-deploy bind'",
                  machine);
    return problem_;
  }
  if (settings.system != nullptr && std::strcmp(settings.system, system_) != 0) {
    return "DYNAMICCL_SYSTEM is not what the artifact calls this machine";
  }
  const auto num_ranks = static_cast<std::size_t>(place.num_ranks);
  const auto num_nodes = static_cast<std::size_t>(place.num_nodes);
  char wanted[kHexBytes];
  if (!index->table_hash(system_, num_nodes, num_ranks, wanted)) {
    std::snprintf(problem_, sizeof problem_,
                  "the artifact has no table for %d ranks on %d nodes of %s", place.num_ranks,
                  place.num_nodes, system_);
    return problem_;
  }
  std::snprintf(path, sizeof path, "%s/tables/%s/nodes%d_ranks%d.dct", settings.artifact, system_,
                place.num_nodes, place.num_ranks);
  if (const char* reason = read_trusted(path, table_, sizeof table_, &table_bytes_)) {
    std::snprintf(problem_, sizeof problem_, "its table: %s", reason);
    return problem_;
  }
  sha256_hex(table_, table_bytes_, table_hash_);
  if (std::strcmp(table_hash_, wanted) != 0) {
    return "its table is not the one that plugin.index names";
  }
  auto* decoded = static_cast<DecisionTable*>(std::malloc(sizeof(DecisionTable)));
  if (decoded == nullptr) return "memory is short";
  const char* reason = decode_table(table_, table_bytes_, decoded);
  if (reason == nullptr &&
      (decoded->num_nodes != place.num_nodes || decoded->num_ranks != place.num_ranks)) {
    reason = "it was made for another number of ranks or nodes";
  }
  if (reason == nullptr) {
    num_entries_ = kNumCollectives * decoded->num_bins;
    num_decided_ = 0;
    for (int i = 0; i < num_entries_; ++i) num_decided_ += decoded->entries[i].act;
    for (int i = 0; i < kNumCollectives; ++i) noise_ppm_[i] = noise_ppm_of(*index, system_, i);
  } else {
    std::snprintf(problem_, sizeof problem_, "its table: %s", reason);
  }
  std::free(decoded);
  return reason;
}

void Artifact::write_identity(const Member::Place& place,
                              char (&text)[kIdentityBytes]) const noexcept {
  char machine[kFingerprintBytes];
  own_fingerprint(loaded_nccl_version(), machine);
  // The problem comes first: it explains why this rank differs from the others.
  std::snprintf(text, kIdentityBytes,
                "problem=%s\nplugin=%s\nmachine=%s\nartifact=%s\nsystem=%s\ntable=%s\nranks=%d\n"
                "nodes=%d\n",
                problem() != nullptr ? problem_ : "none", kPluginVersion, machine, hash_,
                system_[0] != '\0' ? system_ : "none", table_hash_, place.num_ranks,
                place.num_nodes);
}

}  // namespace dynamiccl
