// Every ABI version answers alike from a good table: the cell, the channels, nothing else.
#include <cmath>
#include <limits>

#include "tests/check.h"
#include "tests/library.h"
#include "tests/table_file.h"

using namespace dynamiccl;

namespace {

const int kWithCosts[] = {3, 4, 5, 6};

/// Whether nothing was written at all.
bool untouched(const Call& before, const Call& after) {
  bool same = after.num_channels == before.num_channels && after.algorithm == before.algorithm &&
              after.protocol == before.protocol && after.result == ncclSuccess;
  for (std::size_t i = 0; i < before.costs.size(); ++i) {
    const bool both_nan = std::isnan(before.costs[i]) && std::isnan(after.costs[i]);
    same = same && (both_nan || before.costs[i] == after.costs[i]);
  }
  return same;
}

/// Whether `cell` was set to 0.0, the channels to `num_channels`, and nothing else written.
bool forced(const Call& before, const Call& after, int cell, int num_channels) {
  Call expected = before;
  expected.costs[static_cast<std::size_t>(cell)] = 0.0F;
  expected.num_channels = num_channels;
  return untouched(expected, after);
}

/// One answer from a table made of one entry.
Call answer(const Library& library, const ArtifactDirectory& artifact, int version, Entry entry,
            const Call& call, int num_nodes = 1) {
  const int num_ranks = 8 * num_nodes;
  artifact.write(num_nodes, num_ranks, table_of(num_nodes, num_ranks, entry, call.collective));
  void* context = library.init(version, static_cast<std::size_t>(num_ranks),
                               static_cast<std::size_t>(num_nodes));
  CHECK(context != nullptr);
  const Call after = library.ask(version, context, call);
  library.finalize(version, context);
  return after;
}

void concrete_entry(const Library& library, const ArtifactDirectory& artifact) {
  const Entry ring_ll128 = {kRing, kLL128, 8, 1, 0};
  for (const int version : kWithCosts) {
    for (const int num_algorithms : {6, 7}) {
      Call call;
      call.num_algorithms = num_algorithms;
      call.costs.assign(static_cast<std::size_t>(num_algorithms) * 3, 10.0F);
      CHECK(forced(call, answer(library, artifact, version, ring_ll128, call), 4, 8));
      call.costs[4] = -1.0F;
      CHECK(untouched(call, answer(library, artifact, version, ring_ll128, call)));
      call.costs.assign(call.costs.size(), -1.0F);
      CHECK(untouched(call, answer(library, artifact, version, ring_ll128, call)));
    }
  }
}

void auto_knobs(const Library& library, const ArtifactDirectory& artifact) {
  for (const int version : kWithCosts) {
    Call call;
    call.costs[5] = 3.0F;   // Ring/Simple
    call.costs[3] = 4.0F;   // Ring/LL
    call.costs[17] = 2.0F;  // NVLSTree/Simple
    CHECK(forced(call, answer(library, artifact, version, {kRing, kAuto, 0, 1, 0}, call), 5, 0));
    CHECK(forced(call, answer(library, artifact, version, {kAuto, kLL, 4, 1, 0}, call), 3, 4));
    CHECK(forced(call, answer(library, artifact, version, {kAuto, kAuto, 4, 1, 0}, call), 17, 4));
    call.costs.assign(21, 10.0F);  // ties go to the lower index
    CHECK(forced(call, answer(library, artifact, version, {kAuto, kAuto, 4, 1, 0}, call), 0, 4));
    CHECK(forced(call, answer(library, artifact, version, {kRing, kAuto, 4, 1, 0}, call), 3, 4));
  }
}

void odd_costs(const Library& library, const ArtifactDirectory& artifact) {
  const Entry ring_simple = {kRing, kSimple, 8, 1, 0};
  for (const float odd :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), -5.0F}) {
    for (const int version : kWithCosts) {
      Call call;
      call.costs[5] = odd;
      CHECK(untouched(call, answer(library, artifact, version, ring_simple, call)));
      CHECK(forced(call, answer(library, artifact, version, {kRing, kAuto, 8, 1, 0}, call), 3, 8));
    }
  }
  for (const float free : {0.0F, -0.0F}) {
    Call call;
    call.costs[0] = free;  // it would win NCCL's tie up to 2.30
    CHECK(untouched(call, answer(library, artifact, 5, {kTree, kSimple, 8, 1, 0}, call)));
    CHECK(untouched(call, answer(library, artifact, 5, {kAuto, kSimple, 8, 1, 0}, call)));
    call.costs[0] = 10.0F;
    call.costs[20] = free;  // and this one from 2.31 on
    CHECK(untouched(call, answer(library, artifact, 5, {kTree, kSimple, 8, 1, 0}, call)));
  }
}

void algorithm_newer_than_nccl(const Library& library, const ArtifactDirectory& artifact) {
  Call seven;
  seven.collective = kAllGather;
  Call six = seven;  // 2.22: the cells behind are not the cost table's
  six.num_algorithms = 6;
  artifact.write(1, 8, table_of(1, 8, {kPAT, kSimple, 8, 1, 0}, kAllGather));
  void* context = library.init(3, 8, 1);
  CHECK(forced(seven, library.ask(3, context, seven), 20, 0));  // no channels from 2.29 on
  CHECK(untouched(six, library.ask(3, context, six)));
  library.finalize(3, context);
}

void relegated_ring(const Library& library, const ArtifactDirectory& artifact) {
  Call call;
  for (const std::size_t cell : {3U, 4U, 5U}) call.costs[cell] = 10.0F * 1024;
  for (const int version : kWithCosts) {
    CHECK(untouched(call, answer(library, artifact, version, {kRing, kLL, 8, 1, 0}, call)));
    CHECK(untouched(call, answer(library, artifact, version, {kRing, kAuto, 8, 1, 0}, call)));
    CHECK(forced(call, answer(library, artifact, version, {kAuto, kLL, 8, 1, 0}, call), 0, 8));
  }
  call.costs[4] = 999.0F;  // one Ring cell within the ratio: not relegated
  CHECK(forced(call, answer(library, artifact, 5, {kRing, kLL, 8, 1, 0}, call), 3, 8));
  call.costs.assign(21, -1.0F);
  call.costs[3] = 5000.0F;  // Ring alone
  CHECK(forced(call, answer(library, artifact, 5, {kRing, kLL, 8, 1, 0}, call), 3, 8));
}

void channels_left_to_nccl(const Library& library, const ArtifactDirectory& artifact) {
  const Entry any_simple = {kAuto, kSimple, 8, 1, 0};
  for (const int version : kWithCosts) {
    for (const std::int8_t algorithm : {std::int8_t{kCollNetDirect}, std::int8_t{kCollNetChain}}) {
      Call call;
      const int cell = algorithm * 3 + kSimple;
      CHECK(forced(call, answer(library, artifact, version, {algorithm, kSimple, 8, 1, 0}, call),
                   cell, 0));
      call.costs[static_cast<std::size_t>(cell)] = 1.0F;  // AUTO may land there as well
      CHECK(forced(call, answer(library, artifact, version, any_simple, call), cell, 0));
    }
    Call nvls;
    nvls.costs[14] = 1.0F;
    CHECK(forced(nvls, answer(library, artifact, version, any_simple, nvls), 14, 8));
    CHECK(forced(nvls, answer(library, artifact, version, any_simple, nvls, 2), 14, 0));
    Call eighth;  // RCCL's, or one that does not exist yet
    eighth.num_algorithms = 8;
    eighth.costs.assign(24, 10.0F);
    CHECK(untouched(eighth, answer(library, artifact, version, any_simple, eighth)));
  }
}

void strange_arguments(const Library& library, const ArtifactDirectory& artifact) {
  artifact.write(1, 8, table_of(1, 8, {kRing, kLL, 8, 1, 0}, kAllReduce, 40, 60));
  for (const int version : kWithCosts) {
    void* context = library.init(version, 8, 1);
    Call call;
    for (const int collective : {-1, 5, 8, 1 << 30}) {
      call.collective = collective;
      CHECK(untouched(call, library.ask(version, context, call)));
    }
    call.collective = kAllReduce;
    for (const std::size_t size : {std::size_t{0}, std::size_t{1}, std::size_t{900},
                                   std::size_t{1} << 25, ~std::size_t{0}}) {
      call.size_bytes = size;
      CHECK(untouched(call, library.ask(version, context, call)));
    }
    call.size_bytes = 1 << 20;
    for (const int num_algorithms : {-1, 0, 1, 17}) {
      call.num_algorithms = num_algorithms;
      CHECK(untouched(call, library.ask(version, context, call)));
    }
    call.num_algorithms = 7;
    for (const int num_protocols : {-1, 0, 2, 4}) {
      call.num_protocols = num_protocols;
      CHECK(untouched(call, library.ask(version, context, call)));
    }
    library.finalize(version, context);
    CHECK(untouched(Call(), library.ask(version, nullptr, Call())));
    CHECK(library.finalize(version, nullptr) == ncclSuccess);
  }
}

void null_pointers(const Library& library) {
  void* context = library.init(6, 8, 1);
  int number = 0;
  float costs[21] = {};
  const auto* v2 = library.at<ncclTuner_v2_t>(2);
  const auto* v6 = library.at<ncclTuner_v6_t>(6);
  CHECK(v6->getCollInfo(context, 4, 1 << 20, 1, nullptr, 7, 3, 0, &number) == ncclSuccess);
  CHECK(v6->getCollInfo(context, 4, 1 << 20, 1, reinterpret_cast<float**>(costs), 7, 3, 0,
                        nullptr) == ncclSuccess);
  CHECK(v2->getCollInfo(context, 4, 1 << 20, 0, 0, 1, nullptr, nullptr, nullptr) == ncclSuccess);
  CHECK(v2->init(8, 1, keep_line, nullptr) == ncclSuccess);
  CHECK(v6->init(nullptr, 7, 8, 1, keep_line, nullptr, nullptr) == ncclSuccess);
  CHECK(number == 0);
  library.finalize(6, context);
}

/// A table's chunk size is for sweeps: a rank that had simulated a group would not get it.
void chunk_sizes(const Library& library, const ArtifactDirectory& artifact) {
  CHECK(
      forced(Call(), answer(library, artifact, 6, {kRing, kSimple, 8, 1, 1 << 16}, Call()), 5, 8));
  CHECK(library.at<ncclTuner_v6_t>(6)->getChunkSize == nullptr);
}

/// A cell of LL that costs nothing would start a symmetric kernel on unregistered buffers.
void symmetric_kernels(const Library& library, const ArtifactDirectory& artifact) {
  artifact.write(1, 8, table_of(1, 8, {kRing, kLL, 8, 1, 0}));
  Call symmetric;
  symmetric.num_pipe_ops = 0;
  for (const int version : kWithCosts) {
    void* context = library.init(version, 8, 1);
    CHECK(untouched(symmetric, library.ask(version, context, symmetric)));
    CHECK(forced(Call(), library.ask(version, context, Call()), kRing * kNumProtocols + kLL, 8));
    library.finalize(version, context);
  }
}

/// NCCL 2.21 has no cost table to see what is available by.
void version_2(const Library& library, const ArtifactDirectory& artifact) {
  artifact.write(1, 8, table_of(1, 8, {kRing, kLL128, 8, 1, 0}));
  t_lines.clear();
  CHECK(library.init(2, 8, 1) == nullptr && t_init_result == ncclSuccess);
  CHECK(t_lines.size() == 1 && t_lines[0].find("NCCL 2.21 has no cost table") != std::string::npos);
  CHECK(untouched(Call(), library.ask(2, nullptr, Call())));
}

}  // namespace

int main(int, char** arguments) {
  const Library library(arguments[1]);
  const ArtifactDirectory artifact(arguments[2], "versions");
  setenv("DYNAMICCL_WORD", "all", 1);  // two nodes of this host
  concrete_entry(library, artifact);
  auto_knobs(library, artifact);
  odd_costs(library, artifact);
  algorithm_newer_than_nccl(library, artifact);
  relegated_ring(library, artifact);
  channels_left_to_nccl(library, artifact);
  strange_arguments(library, artifact);
  null_pointers(library);
  chunk_sizes(library, artifact);
  symmetric_kernels(library, artifact);
  version_2(library, artifact);
  return g_failures;
}
