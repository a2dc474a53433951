// Questions that NCCL should not ask, in every ABI version, and ids. What good questions get is
// what the law in Python says (tests/serve/test_plugin.py).
#include "identity/communicator.h"
#include "identity/ids.h"
#include "tests/check.h"
#include "tests/library.h"
#include "tests/table_file.h"

using namespace dynamiccl;

namespace {

/// Whether nothing was written at all.
bool untouched(const Call& before, const Call& after) {
  return after.num_channels == before.num_channels && after.costs == before.costs &&
         after.result == ncclSuccess;
}

void strange_arguments(const Library& library, const ArtifactDirectory& artifact) {
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
  artifact.write(1, 8, table_of(1, 8, {kRing, kLL, 8, 1, 0}, kAllReduce, 40, 60));
  for (const int version : {4, 5, 6}) {
    void* context = library.init(version, 8, 1);
    CHECK(!untouched(Call(), library.ask(version, context, Call())));
    CHECK(untouched(Call(), library.ask(version, nullptr, Call())));
    for (const Call& call : strange) CHECK(untouched(call, library.ask(version, context, call)));
    CHECK(library.finalize(version, context) == ncclSuccess);
    CHECK(library.finalize(version, nullptr) == ncclSuccess);
  }
  // Of an algorithm that this NCCL has not, the cells are not the cost table's.
  Call call;
  call.collective = kAllGather;
  call.num_algorithms = 6;
  artifact.write(1, 8, table_of(1, 8, {kPAT, kSimple, 8, 1, 0}, kAllGather));
  void* context = library.init(4, 8, 1);
  CHECK(untouched(call, library.ask(4, context, call)));
  library.finalize(4, context);
}

void null_pointers(const Library& library) {
  void* context = library.init(6, 8, 1);
  int number = 0;
  float costs[21] = {};
  auto* table = reinterpret_cast<float**>(costs);
  const auto* v4 = library.at<ncclTuner_v4_t>(4);
  const auto* v6 = library.at<ncclTuner_v6_t>(6);
  CHECK(v6->getCollInfo(context, 4, 1 << 20, 1, nullptr, 7, 3, 0, &number) == ncclSuccess);
  CHECK(v6->getCollInfo(context, 4, 1 << 20, 1, table, 7, 3, 0, nullptr) == ncclSuccess);
  CHECK(v4->init(8, 1, keep_line, nullptr) == ncclSuccess);
  CHECK(v6->init(nullptr, 7, 8, 1, keep_line, nullptr, nullptr) == ncclSuccess);
  CHECK(number == 0);
  library.finalize(6, context);
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
  const ArtifactDirectory artifact(arguments[2], "questions");
  strange_arguments(library, artifact);
  null_pointers(library);
  ids_of_shrunk_communicators();
  return g_failures;
}
