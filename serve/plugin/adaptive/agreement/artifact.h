// The artifact's data for one communicator on this rank, and the `name=value` lines that must be
// equal on all of its ranks.
#pragma once

#include <cstddef>
#include <cstdint>

#include "adaptive/agreement/member.h"
#include "adaptive/agreement/settings.h"
#include "identity/fingerprint.h"
#include "identity/index.h"
#include "vocabulary.h"

namespace dynamiccl {

inline constexpr std::size_t kIdentityBytes = 2048;

class Artifact {
 public:
  /// Reads index and table; problem() then tells what failed, if anything.
  void load(const Settings& settings, const Member::Place& place) noexcept;

  const char* problem() const noexcept { return problem_[0] != '\0' ? problem_ : nullptr; }
  const std::uint8_t* table() const noexcept { return table_; }
  std::size_t table_bytes() const noexcept { return table_bytes_; }
  const char* hash() const noexcept { return hash_; }
  const char* system() const noexcept { return system_; }
  /// Noise of a collective in parts per million; -1: unknown.
  std::int64_t noise_ppm(int collective) const noexcept { return noise_ppm_[collective]; }
  int num_decided() const noexcept { return num_decided_; }
  int num_entries() const noexcept { return num_entries_; }

  /// Lines `name=value`; see identity/difference.h.
  void write_identity(const Member::Place& place, char (&text)[kIdentityBytes]) const noexcept;

 private:
  const char* read(const Settings& settings, const Member::Place& place) noexcept;

  char problem_[320] = "";
  char system_[kSystemBytes] = "";
  char hash_[kHexBytes] = "none";
  char table_hash_[kHexBytes] = "none";
  std::uint8_t table_[kMaxFileBytes];
  std::size_t table_bytes_ = 0;
  std::int64_t noise_ppm_[kNumCollectives] = {-1, -1, -1, -1, -1};
  int num_decided_ = 0;
  int num_entries_ = 0;
};

}  // namespace dynamiccl
