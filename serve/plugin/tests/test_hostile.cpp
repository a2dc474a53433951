// Whatever lies on disk and in the environment: abstain, say why once, never crash.
#include <sys/stat.h>
#include <unistd.h>

#include "tests/check.h"
#include "tests/library.h"
#include "tests/table_file.h"

using namespace dynamiccl;

namespace {

const Entry kGood = {kRing, kLL128, 8, 1, 0};

/// Whether a communicator abstains on each rank, and the first one's line says `why`.
bool abstains(const Library& library, const char* why, std::size_t num_ranks = 8,
              std::size_t num_nodes = 1) {
  t_lines.clear();
  void* context = library.init(6, num_ranks, num_nodes);
  const bool said = t_lines.size() == 1 && t_lines[0].find("DYNAMICCL: ") == 0 &&
                    t_lines[0].find("NCCL's own choice stands: ") != std::string::npos &&
                    t_lines[0].find(why) != std::string::npos;
  if (!said || context != nullptr) {
    std::fprintf(stderr, "it said: %s\n", t_lines.empty() ? "-" : t_lines[0].c_str());
  }
  library.finalize(6, context);
  return said && context == nullptr;
}

void wrong_communicator(const Library& library, const ArtifactDirectory& artifact) {
  artifact.write(1, 8, table_of(1, 8, kGood));
  CHECK(abstains(library, "DYNAMICCL_ARBITER is not set", 16, 2));
  CHECK(abstains(library, "different numbers of ranks", 8, 0));
  artifact.write(1, 16, table_of(1, 8, kGood));
  CHECK(abstains(library, "another number of ranks", 16, 1));
  artifact.write(1, 16, table_of(2, 16, kGood));
  CHECK(abstains(library, "another number of ranks", 16, 1));
  std::remove(artifact.path(1, 16).c_str());
}

void set(const char* name, const char* value) {
  value != nullptr ? setenv(name, value, 1) : unsetenv(name);
}

void bad_environment(const Library& library, const ArtifactDirectory& artifact,
                     const std::string& directory) {
  artifact.write(1, 8, table_of(1, 8, kGood));
  const std::string long_path(5000, 'a'), nowhere = directory + "/nowhere%n%s";
  const struct {
    const char *name, *value, *why;
  } cases[] = {
      {"DYNAMICCL_JOB", "0123456789abcde", "DYNAMICCL_JOB is not 16 hex digits"},
      {"DYNAMICCL_JOB", "0123456789abcdeg", "DYNAMICCL_JOB is not 16 hex digits"},
      {"DYNAMICCL_JOB", "../../../../etc/", "DYNAMICCL_JOB is not 16 hex digits"},
      {"DYNAMICCL_HOST", nullptr, "start each rank through dynamiccl-run: this is "},
      {"DYNAMICCL_MACHINE", nullptr, "DYNAMICCL_MACHINE, _SYSTEMS, _TABLES or _INDEX is not set"},
      {"DYNAMICCL_SYSTEMS", nullptr, "DYNAMICCL_MACHINE, _SYSTEMS, _TABLES or _INDEX is not set"},
      {"DYNAMICCL_SYSTEMS", "22809=test", "does not know NCCL 23007 on this machine, gpu=Test*8"},
      {"DYNAMICCL_SYSTEMS", "23007", "does not know NCCL 23007"},
      {"DYNAMICCL_SYSTEMS", " 123007=test 23007= ", "does not know NCCL 23007"},
      {"DYNAMICCL_SYSTEMS", "23007=other 22809=test", "no table for 8 ranks on 1 nodes of other"},
      {"DYNAMICCL_TABLES", nullptr, "DYNAMICCL_MACHINE, _SYSTEMS, _TABLES or _INDEX is not set"},
      {"DYNAMICCL_TABLES", long_path.c_str(), "DYNAMICCL_TABLES is too long"},
      {"DYNAMICCL_TABLES", nowhere.c_str(), "no table for 8 ranks"},
      {"DYNAMICCL_INDEX", "0123", "DYNAMICCL_MACHINE, _SYSTEMS, _TABLES or _INDEX is not set"},
      {"DYNAMICCL_PROBLEM", "the artifact is %s%n not there", "the artifact is %s%n not there"},
      {"DYNAMICCL_PROBLEM", long_path.c_str(), "aaaaaaaaaa"},
  };
  for (const auto& [name, value, why] : cases) {
    const char* before = std::getenv(name);
    const std::string kept = before != nullptr ? before : "";
    set(name, value);
    CHECK(abstains(library, why));
    set(name, before != nullptr ? kept.c_str() : nullptr);
  }
  set("DYNAMICCL_DISABLE", "1");
  t_lines.clear();
  CHECK(library.init(6, 8, 1) == nullptr && t_lines.empty());
  set("DYNAMICCL_DISABLE", nullptr);
  set("DYNAMICCL_SYSTEMS", "22809=test-system 23007=test");
  void* context = library.init(6, 8, 1);
  CHECK(context != nullptr);
  library.finalize(6, context);
}

void not_a_file(const Library& library, const ArtifactDirectory& artifact) {
  const std::string path = artifact.path(1, 8);
  std::remove(path.c_str());
  CHECK(abstains(library, "no table for 8 ranks"));
  mkdir(path.c_str(), 0777);
  CHECK(abstains(library, "its table: it is not a regular file"));
  rmdir(path.c_str());
  mkfifo(path.c_str(), 0666);  // must not block
  CHECK(abstains(library, "its table: it is not a regular file"));
  std::remove(path.c_str());
  CHECK(symlink("/dev/zero", path.c_str()) == 0);
  CHECK(abstains(library, "its table: it is not a regular file"));
  std::remove(path.c_str());
}

void a_file_that_others_may_change(const Library& library, const ArtifactDirectory& artifact) {
  artifact.write(1, 8, table_of(1, 8, kGood));
  const std::string path = artifact.path(1, 8);
  for (const mode_t mode : {0664U, 0646U}) {
    CHECK(chmod(path.c_str(), mode) == 0);
    CHECK(abstains(library, "its table: others may write to it"));
  }
  CHECK(chmod(path.c_str(), 0444) == 0);
  if (geteuid() == 0) {
    CHECK(chown(path.c_str(), 1, 1) == 0);
    CHECK(abstains(library, "its table: it belongs to another user"));
  }
  std::remove(path.c_str());
}

void damaged_files(const Library& library, const ArtifactDirectory& artifact) {
  const Bytes good = table_of(1, 8, kGood, kAllReduce, 80, 2);
  for (std::size_t size = 0; size < good.size(); ++size) {
    artifact.write(1, 8, Bytes(good.begin(), good.begin() + static_cast<std::ptrdiff_t>(size)));
    CHECK(abstains(library, "its table: it"));
  }
  for (std::size_t i = 0; i < good.size(); ++i) {
    Bytes flipped = good;
    flipped[i] ^= 0x10;
    artifact.write(1, 8, flipped);
    CHECK(abstains(library, "its table: it"));
  }
  Bytes longer = good;
  longer.push_back(0);
  artifact.write(1, 8, longer);
  CHECK(abstains(library, "length"));
  artifact.write(1, 8, Bytes(2 << 20, 0));
  CHECK(abstains(library, "its table: it is not"));
}

/// Checksums that match do not make the numbers right: every field is checked on its own.
void resealed_header(const Library& library, const ArtifactDirectory& artifact) {
  const Bytes good = table_of(1, 8, kGood, kAllReduce, 80, 2);
  const int odd_values[] = {-1, 0, 3, 250, 1 << 24, 0x7fffffff, static_cast<int>(0x80000000)};
  for (std::size_t offset = 8; offset < kHeaderBytes; offset += 4) {
    for (const int odd : odd_values) {
      Bytes bad(good.begin(), good.end() - 8);
      for (std::size_t i = 0; i < 4; ++i) {
        bad[offset + i] = static_cast<std::uint8_t>(static_cast<std::uint32_t>(odd) >> (8 * i));
      }
      artifact.write(1, 8, sealed(bad));
      const bool fits = offset == 24 && (odd == 0 || odd == 3);  // first_bin may be anything small
      if (fits) continue;
      CHECK(abstains(library, "its table: it"));
    }
  }
}

void entries_outside_the_vocabulary(const Library& library, const ArtifactDirectory& artifact) {
  const Entry bad_entries[] = {
      {7, kLL, 8, 1, 0},      {-2, kLL, 8, 1, 0},       {127, kLL, 8, 1, 0},
      {kRing, 3, 8, 1, 0},    {kRing, -2, 8, 1, 0},     {kRing, kLL, 65, 1, 0},
      {kRing, kLL, -3, 1, 0}, {kRing, kLL, 127, 1, 0},  {kRing, kLL, 8, 2, 0},
      {kRing, kLL, 8, -1, 0}, {kRing, kLL, 8, 0, 0},    {kAuto, kAuto, 0, 1, 0},
      {kRing, kLL, 8, 1, -1}, {kPAT, kSimple, 8, 1, 0},  // AllReduce has no PAT
      {kPAT, kAuto, 8, 1, 0}, {kNVLS, kLL, 8, 1, 0},    {kCollNetDirect, kLL128, 8, 1, 0},
  };
  for (const Entry& bad : bad_entries) {
    artifact.write(1, 8, table_of(1, 8, bad));
    CHECK(abstains(library, "outside the vocabulary"));
  }
  artifact.write(1, 8, table_of(1, 8, {kTree, kLL, 8, 1, 0}, kBroadcast));
  CHECK(abstains(library, "outside the vocabulary"));
}

}  // namespace

int main(int, char** arguments) {
  const Library library(arguments[1]);
  const ArtifactDirectory artifact(arguments[2], "hostile");
  wrong_communicator(library, artifact);
  bad_environment(library, artifact, arguments[2]);
  not_a_file(library, artifact);
  a_file_that_others_may_change(library, artifact);
  damaged_files(library, artifact);
  resealed_header(library, artifact);
  entries_outside_the_vocabulary(library, artifact);
  return g_failures;
}
