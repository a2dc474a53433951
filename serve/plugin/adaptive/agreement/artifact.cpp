// Runs on the files' thread: files and the fingerprint can take long.
#include "adaptive/agreement/artifact.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "platform/allocate.h"
#include "table.h"
#include "trusted/file.h"

namespace dynamiccl {
namespace {

constexpr std::size_t kMaxPathBytes = 4096;

/// 64 KiB, so not for a thread's stack.
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
  TrustedFile directory;
  if (const char* reason = directory.open_directory(settings.artifact)) {
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
  has_hash_ = true;
  const char* system = index->find_system(own_fingerprint());
  if (system == nullptr) {
    std::snprintf(problem_, sizeof problem_,
                  "the artifact does not know this machine, %s; see 'dynamiccl-deploy bind'",
                  own_fingerprint());
    return problem_;
  }
  std::snprintf(system_, sizeof system_, "%s", system);
  if (settings.system != nullptr && std::strcmp(settings.system, system_) != 0) {
    return "DYNAMICCL_SYSTEM is not what the artifact calls this machine";
  }
  const auto num_ranks = static_cast<std::size_t>(place.num_ranks);
  const auto num_nodes = static_cast<std::size_t>(place.num_nodes);
  std::uint8_t wanted[kDigestBytes];
  if (!index->file_hash("table", system_, num_nodes, num_ranks, wanted)) {
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
  Sha256 sha;
  sha.update(table_, table_bytes_);
  sha.finish(table_hash_);
  if (std::memcmp(table_hash_, wanted, sizeof wanted) != 0) {
    return "its table is not the one that plugin.index names";
  }
  has_table_ = true;
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
    for (int i = 0; i < kNumCollectives; ++i) noise_ppm_[i] = index->noise_ppm(system_, i);
  } else {
    std::snprintf(problem_, sizeof problem_, "its table: %s", reason);
  }
  std::free(decoded);
  return reason;
}

void Artifact::write_identity(const Member::Place& place,
                              char (&text)[kIdentityBytes]) const noexcept {
  char hash[2 * kDigestBytes + 1] = "none", table[2 * kDigestBytes + 1] = "none";
  if (has_hash_) to_hex(hash_, kDigestBytes, hash);
  if (has_table_) to_hex(table_hash_, kDigestBytes, table);
  // A rank with a problem says it first of all: it is why the others differ.
  std::snprintf(text, kIdentityBytes,
                "problem=%s\nplugin=%s\nmachine=%s\nartifact=%s\nsystem=%s\ntable=%s\nranks=%d\n"
                "nodes=%d\n",
                problem() != nullptr ? problem_ : "none", kPluginVersion, own_fingerprint(), hash,
                system_[0] != '\0' ? system_ : "none", table, place.num_ranks, place.num_nodes);
}

}  // namespace dynamiccl
