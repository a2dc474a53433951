// Whatever lies on disk and in the environment: abstain, say why once, never crash. And questions
// that NCCL should not ask, in every ABI version. Which entries are in the vocabulary is in
// tests/serve/test_sweep.py, what good questions get in tests/serve/test_plugin.py.
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>

#include "identity/communicator.h"
#include "identity/ids.h"
#include "tests/check.h"
#include "tests/library.h"
#include "tests/table_file.h"

using namespace dynamiccl;

namespace {

const Library* g_library = nullptr;
const ArtifactDirectory* g_artifact = nullptr;
const Entry kGood = {kRing, kLL128, 8, 1, 0};

/// Whether a communicator abstains on each rank, and the first one's line says `why`.
bool abstains(const std::string& why, std::size_t num_ranks = 8, std::size_t num_nodes = 1) {
  t_lines.clear();
  const bool has_table = g_library->init(6, num_ranks, num_nodes) != nullptr;
  const std::string line = t_lines.size() == 1 ? t_lines[0] : "";
  const bool said = line.find("DYNAMICCL: ") == 0 && line.find(why) != std::string::npos &&
                    line.find("NCCL's own choice stands: ") != std::string::npos;
  if (!said || has_table) std::fprintf(stderr, "it said: %s\n", line.c_str());
  return said && !has_table;
}

bool abstains_from(const Bytes& table, const std::string& why = "its table: it") {
  g_artifact->write(1, 8, table);
  return abstains(why);
}

void bad_environment() {
  g_artifact->write(1, 8, table_of(1, 8, kGood));
  const std::string long_path(5000, 'a'), missing = "_SYSTEMS, _TABLES or _INDEX is not set";
  const struct {
    const char* name;
    std::string value, why;
  } cases[] = {
      {"DYNAMICCL_JOB", "../../../../etc/", "DYNAMICCL_JOB is not 16 hex digits"},
      {"DYNAMICCL_HOST", "", "start each rank through dynamiccl-run: this is "},
      {"DYNAMICCL_MACHINE", "", missing},
      {"DYNAMICCL_SYSTEMS",
       " 123007=test 23007= ", "does not know NCCL 23007 on this machine, gpu"},
      {"DYNAMICCL_SYSTEMS", "23007=other 22809=test", "no table for 8 ranks on 1 nodes of other"},
      {"DYNAMICCL_TABLES", long_path, "DYNAMICCL_TABLES is too long"},
      {"DYNAMICCL_TABLES", "/nowhere%n%s", "no table for 8 ranks"},
      {"DYNAMICCL_INDEX", "0123", missing},
      {"DYNAMICCL_PROBLEM", "the artifact is %s%n not there", "the artifact is %s%n not there"},
      {"DYNAMICCL_PROBLEM", long_path, "aaaaaaaaaa"},
  };
  for (const auto& [name, value, why] : cases) {
    const char* before = std::getenv(name);
    const std::string kept = before != nullptr ? before : "";
    setenv(name, value.c_str(), 1);
    CHECK(abstains(why));
    setenv(name, kept.c_str(), 1);  // empty is as unset
  }
  setenv("DYNAMICCL_DISABLE", "1", 1);
  t_lines.clear();
  CHECK(g_library->init(6, 8, 1) == nullptr && t_lines.empty());
  unsetenv("DYNAMICCL_DISABLE");
  CHECK(g_library->init(6, 8, 1) != nullptr);
}

void not_a_file_of_ours() {
  const std::string path = g_artifact->path(1, 8);
  for (const auto make : {mkdir, mkfifo}) {  // of which the second must not block
    std::remove(path.c_str());
    CHECK(make(path.c_str(), 0777) == 0 && abstains("its table: it is not a regular file"));
  }
  std::remove(path.c_str());
  CHECK(symlink("/dev/zero", path.c_str()) == 0);
  CHECK(abstains("its table: it is not a regular file"));
  std::remove(path.c_str());
  CHECK(abstains("no table for 8 ranks"));
  for (const mode_t mode : {0664U, 0646U}) {
    g_artifact->write(1, 8, table_of(1, 8, kGood));
    CHECK(chmod(path.c_str(), mode) == 0 && abstains("its table: others may write to it"));
  }
  CHECK(chmod(path.c_str(), 0444) == 0);
  if (geteuid() == 0) {
    CHECK(chown(path.c_str(), 1, 1) == 0 && abstains("its table: it belongs to another user"));
  }
  std::remove(path.c_str());
}

void bad_tables() {
  const Bytes good = table_of(1, 8, kGood, kAllReduce, 80, 2);
  for (std::size_t i = 0; i < good.size(); ++i) {
    Bytes flipped = good;
    flipped[i] ^= 0x10;
    CHECK(abstains_from(flipped));
    CHECK(abstains_from(Bytes(good.begin(), good.begin() + static_cast<std::ptrdiff_t>(i))));
  }
  Bytes longer = good;
  longer.push_back(0);
  CHECK(abstains_from(longer, "length"));
  CHECK(abstains_from(Bytes(2 << 20, 0)));
  // Checksums that match do not make the numbers right: every field is checked on its own.
  for (std::size_t offset = 8; offset < kHeaderBytes; offset += 4) {
    for (const int odd : {-1, 0, 3, 250, 1 << 24, 0x7fffffff, static_cast<int>(0x80000000)}) {
      Bytes bad(good.begin(), good.end() - 8);
      std::memcpy(&bad[offset], &odd, 4);
      if (offset == 24 && (odd == 0 || odd == 3)) continue;  // first_bin may be anything small
      CHECK(abstains_from(sealed(bad)));
    }
  }
  const Entry tree = {kTree, kLL, 8, 1, 0}, many = {kRing, kLL, 65, 1, 0};
  CHECK(abstains_from(table_of(1, 8, tree, kBroadcast), "outside the vocabulary"));
  CHECK(abstains_from(table_of(1, 8, many), "outside the vocabulary"));
  g_artifact->write(1, 16, table_of(1, 8, kGood));
  CHECK(abstains("another number of ranks", 16, 1));
  g_artifact->write(1, 16, table_of(2, 16, kGood));
  CHECK(abstains("another number of ranks", 16, 1));
  CHECK(abstains("different numbers of ranks", 8, 0));
}

/// Whether nothing was written at all.
bool untouched(const Call& before, const Call& after) {
  return after.num_channels == before.num_channels && after.costs == before.costs &&
         after.result == ncclSuccess;
}

void strange_arguments() {
  std::vector<Call> strange;
  for (const int number : {-1, 5, 8, 1 << 30}) strange.emplace_back().collective = number;
  for (const std::size_t size :
       {std::size_t{0}, std::size_t{1}, std::size_t{900}, std::size_t{1} << 25, ~std::size_t{0}}) {
    strange.emplace_back().size_bytes = size;
  }
  for (const int number : {-1, 0, 1, 17}) strange.emplace_back().num_algorithms = number;
  for (const int number : {-1, 0, 2, 4}) strange.emplace_back().num_protocols = number;
  // A cell of LL would start a symmetric kernel on unregistered buffers.
  strange.emplace_back().num_pipe_ops = 0;
  // RCCL's, or one that does not exist yet.
  strange.emplace_back().num_algorithms = 8;
  strange.back().costs.assign(24, 10.0F);
  g_artifact->write(1, 8, table_of(1, 8, {kRing, kLL, 8, 1, 0}, kAllReduce, 40, 60));
  for (const int version : {4, 5, 6}) {
    void* context = g_library->init(version, 8, 1);
    CHECK(!untouched(Call(), g_library->ask(version, context, Call())));
    CHECK(untouched(Call(), g_library->ask(version, nullptr, Call())));
    for (const Call& call : strange) CHECK(untouched(call, g_library->ask(version, context, call)));
    CHECK(g_library->finalize(version, context) == ncclSuccess);
    CHECK(g_library->finalize(version, nullptr) == ncclSuccess);
  }
  // Of an algorithm that this NCCL has not, the cells are not the cost table's.
  Call call;
  call.collective = kAllGather;
  call.num_algorithms = 6;
  g_artifact->write(1, 8, table_of(1, 8, {kPAT, kSimple, 8, 1, 0}, kAllGather));
  void* context = g_library->init(4, 8, 1);
  CHECK(untouched(call, g_library->ask(4, context, call)));
  g_library->finalize(4, context);
}

void null_pointers() {
  void* context = g_library->init(6, 8, 1);
  int number = 0;
  float costs[21] = {};
  auto* table = reinterpret_cast<float**>(costs);
  const auto* v4 = g_library->at<ncclTuner_v4_t>(4);
  const auto* v6 = g_library->at<ncclTuner_v6_t>(6);
  CHECK(v6->getCollInfo(context, 4, 1 << 20, 1, nullptr, 7, 3, 0, &number) == ncclSuccess);
  CHECK(v6->getCollInfo(context, 4, 1 << 20, 1, table, 7, 3, 0, nullptr) == ncclSuccess);
  CHECK(v4->init(8, 1, keep_line, nullptr) == ncclSuccess);
  CHECK(v6->init(nullptr, 7, 8, 1, keep_line, nullptr, nullptr) == ncclSuccess);
  CHECK(number == 0);
  g_library->finalize(6, context);
}

/// A shrunk communicator's id is known by its parent's: as NCCL 2.30.7's own bitops.h gives it, for
/// child number 0 and colour 0. And a process that has made many knows each of them.
void ids_of_shrunk_communicators() {
  CHECK(id_of_shrunk(0x0000000000000001) == 0xe04d65164a9c0f25);
  CHECK(id_of_shrunk(0x123456789abcdef0) == 0x0ea127523541c571);
  CHECK(id_of_shrunk(0xfedcba9876543210) == 0xf77654e4e8d9ddde);
  for (std::uint64_t number = 1; number <= 70'000; number += 34'999) {
    Ids ids;
    for (std::uint64_t id = 1; id <= 70'000; ++id) CHECK(!ids.note(id * 0x9e3779b97f4a7c15U));
    CHECK(!ids.note(0));
    CHECK(!ids.note(0x9e3779b97f4a7c15U));  // the same one again
    CHECK(ids.note(id_of_shrunk(number * 0x9e3779b97f4a7c15U)));
    CHECK(ids.note(4));  // and whatever comes later
  }
  CHECK(!check_communicator({8, 1, nullptr, nullptr, 5}).ids_repeat);
  CHECK(check_communicator({8, 1, nullptr, nullptr, id_of_shrunk(5)}).ids_repeat);
}

}  // namespace

int main(int, char** arguments) {
  const Library library(arguments[1]);
  const ArtifactDirectory artifact(arguments[2], "hostile");
  g_library = &library;
  g_artifact = &artifact;
  bad_environment();
  not_a_file_of_ours();
  bad_tables();
  strange_arguments();
  null_pointers();
  ids_of_shrunk_communicators();
  return g_failures != 0;
}
