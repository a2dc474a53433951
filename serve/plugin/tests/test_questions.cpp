// Questions that NCCL should not ask, in every ABI version, threads that ask at once, and ids. What
// good questions get is what the law in Python says (tests/serve/test_plugin.py).
#include "identity/communicator.h"
#include "identity/ids.h"
#include "tests/check.h"
#include "tests/library.h"
#include "tests/table_file.h"

using namespace dynamiccl;

namespace {

const int kVersions[] = {4, 5, 6};
const Entry kRingLl = {kRing, kLL, 8, 1, 0};

/// Whether nothing was written at all.
bool untouched(const Call& before, const Call& after) {
  return after.num_channels == before.num_channels && after.costs == before.costs &&
         after.result == ncclSuccess;
}

/// Of an algorithm that this NCCL has not, the cells are not the cost table's.
void algorithm_newer_than_nccl(const Library& library, const ArtifactDirectory& artifact) {
  artifact.write(1, 8, table_of(1, 8, {kPAT, kSimple, 8, 1, 0}, kAllGather));
  void* context = library.init(4, 8, 1);
  Call call;
  call.collective = kAllGather;
  CHECK(library.ask(4, context, call).costs[20] == 0.0F);
  call.num_algorithms = 6;
  CHECK(untouched(call, library.ask(4, context, call)));
  library.finalize(4, context);
}

void strange_arguments(const Library& library, const ArtifactDirectory& artifact) {
  artifact.write(1, 8, table_of(1, 8, kRingLl, kAllReduce, 40, 60));
  for (const int version : kVersions) {
    void* context = library.init(version, 8, 1);
    const auto is_left_alone = [&](const Call& call) {
      return untouched(call, library.ask(version, context, call));
    };
    CHECK(!is_left_alone(Call()));
    Call call;
    for (const int collective : {-1, 5, 8, 1 << 30}) {
      call.collective = collective;
      CHECK(is_left_alone(call));
    }
    call = Call();
    for (const std::size_t size : {std::size_t{0}, std::size_t{1}, std::size_t{900},
                                   std::size_t{1} << 25, ~std::size_t{0}}) {
      call.size_bytes = size;
      CHECK(is_left_alone(call));
    }
    call = Call();
    for (const int num_algorithms : {-1, 0, 1, 17}) {
      call.num_algorithms = num_algorithms;
      CHECK(is_left_alone(call));
    }
    call = Call();
    for (const int num_protocols : {-1, 0, 2, 4}) {
      call.num_protocols = num_protocols;
      CHECK(is_left_alone(call));
    }
    call = Call();
    call.num_pipe_ops = 0;  // a cell of LL would start a symmetric kernel on unregistered buffers
    CHECK(is_left_alone(call));
    library.finalize(version, context);
    CHECK(untouched(Call(), library.ask(version, nullptr, Call())));
    CHECK(library.finalize(version, nullptr) == ncclSuccess);
  }
}

/// RCCL's, or one that does not exist yet.
void an_eighth_algorithm(const Library& library, const ArtifactDirectory& artifact) {
  artifact.write(1, 8, table_of(1, 8, {kAuto, kSimple, 8, 1, 0}));
  void* context = library.init(5, 8, 1);
  Call call;
  call.num_algorithms = 8;
  call.costs.assign(24, 10.0F);
  CHECK(untouched(call, library.ask(5, context, call)));
  library.finalize(5, context);
}

void null_pointers(const Library& library) {
  void* context = library.init(6, 8, 1);
  int number = 0;
  float costs[21] = {};
  const auto* v4 = library.at<ncclTuner_v4_t>(4);
  const auto* v6 = library.at<ncclTuner_v6_t>(6);
  CHECK(v6->getCollInfo(context, 4, 1 << 20, 1, nullptr, 7, 3, 0, &number) == ncclSuccess);
  CHECK(v6->getCollInfo(context, 4, 1 << 20, 1, reinterpret_cast<float**>(costs), 7, 3, 0,
                        nullptr) == ncclSuccess);
  CHECK(v4->init(8, 1, keep_line, nullptr) == ncclSuccess);
  CHECK(v6->init(nullptr, 7, 8, 1, keep_line, nullptr, nullptr) == ncclSuccess);
  CHECK(number == 0);
  library.finalize(6, context);
}

/// Communicators with two tables, some of them freed; each of the others is asked by two threads.
void contexts_are_independent(const Library& library, const ArtifactDirectory& artifact) {
  artifact.write(1, 8, table_of(1, 8, {kRing, kLL128, 8, 1, 0}));
  artifact.write(1, 16, table_of(1, 16, {kTree, kSimple, 4, 1, 0}));
  void* contexts[8];
  for (int i = 0; i < 8; ++i) contexts[i] = library.init(5, i % 2 == 0 ? 8 : 16, 1);
  for (int i = 0; i < 8; i += 3) library.finalize(5, contexts[i]);
  std::vector<std::thread> threads;
  for (const int i : {1, 2, 4, 5, 7, 1, 2, 4, 5, 7}) {
    threads.emplace_back([&, i] {
      for (int call = 0; call < 2000; ++call) {
        const Call after = library.ask(5, contexts[i], Call());
        CHECK(after.num_channels == (i % 2 == 0 ? 8 : 4));
        CHECK(after.costs[i % 2 == 0 ? 4 : 2] == 0.0F);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const int i : {1, 2, 4, 5, 7}) library.finalize(5, contexts[i]);
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
  algorithm_newer_than_nccl(library, artifact);
  strange_arguments(library, artifact);
  an_eighth_algorithm(library, artifact);
  null_pointers(library);
  contexts_are_independent(library, artifact);
  ids_of_shrunk_communicators();
  return g_failures;
}
