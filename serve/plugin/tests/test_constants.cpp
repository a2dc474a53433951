// An artifact of tuning constants: written into what NCCL shows, alike on all ranks, or not at all.
#include "tests/check.h"
#include "tests/library.h"
#include "tests/table_file.h"
#include "tuner/constants.h"

using namespace dynamiccl;

namespace {

constexpr int kRanks = 4;

/// As NCCL fills them in: none is alike, and one that it does not use is 0.
ncclTunerConstants_v5_t own_constants() {
  ncclTunerConstants_v5_t own;
  double values[kNumConstants];
  for (std::size_t i = 0; i < kNumConstants; ++i) values[i] = 1.0 + static_cast<double>(i);
  values[7] = 0.0;
  std::memcpy(&own, values, sizeof own);
  return own;
}

bool same(const ncclTunerConstants_v5_t& left, const ncclTunerConstants_v5_t& right) {
  return std::memcmp(&left, &right, sizeof left) == 0;
}

bool was_said(const char* text) {
  for (const std::string& line : t_lines) {
    if (line.find(text) != std::string::npos) return true;
  }
  return false;
}

/// A new communicator whose ranks are all shown `own`; its first rank's context.
void* init(const Library& library, int version, const ncclTunerConstants_v5_t& own) {
  library.constants.assign(kRanks, own);
  t_lines.clear();
  return library.init(version, kRanks, 1);
}

void written_on_every_rank(const Library& library, const ArtifactDirectory& artifact) {
  artifact.write_constants(1, kRanks, constants_of(1, kRanks, 3, 16.5));  // Ring/LL, base
  for (const int version : {5, 6}) {
    const ncclTunerConstants_v5_t own = own_constants();
    void* context = init(library, version, own);
    CHECK(context == nullptr && t_init_result == ncclSuccess);
    CHECK(was_said("by the artifact's tuning constants"));
    ncclTunerConstants_v5_t wanted = own;
    wanted.baseLatencies[1][0] = 16.5;
    for (const ncclTunerConstants_v5_t& rank : library.constants) CHECK(same(rank, wanted));
    // Nothing of ours runs in a call.
    const Call call;
    const Call after = library.ask(version, context, call);
    CHECK(after.costs == call.costs && after.num_channels == 0 && after.result == ncclSuccess);
    library.finalize(version, context);
  }
}

void refused(const Library& library, const ArtifactDirectory& artifact, const Bytes& bytes,
             const char* reason) {
  artifact.write_constants(1, kRanks, bytes);
  const ncclTunerConstants_v5_t own = own_constants();
  CHECK(init(library, 6, own) == nullptr && t_init_result == ncclSuccess);
  CHECK(was_said("NCCL's own choice stands") && was_said(reason));
  for (const ncclTunerConstants_v5_t& rank : library.constants) CHECK(same(rank, own));
}

void what_is_absurd_is_refused(const Library& library, const ArtifactDirectory& artifact) {
  const auto with = [](std::size_t index, double value) {
    return constants_of(1, kRanks, index, value);
  };
  refused(library, artifact, with(3, 401.0), "out of bounds: 0.01 to 100 times NCCL's own");
  refused(library, artifact, with(3, 0.039), "out of bounds: 0.01 to 100 times NCCL's own");
  refused(library, artifact, with(7, 1.0),
          "out of bounds: 0.01 to 100 times NCCL's own");  // it is 0 there
  refused(library, artifact, with(3, -1.0), "not a finite, positive number");
  refused(library, artifact, with(3, __builtin_inf()), "not a finite, positive number");
  refused(library, artifact, with(3, __builtin_nan("")), "not a finite, positive number");
  refused(library, artifact, constants_of(1, 8, 3, 2.0), "another number of ranks or nodes");
  Bytes damaged = with(3, 2.0);
  damaged[40] ^= 1U;
  refused(library, artifact, damaged, "its checksum does not match");
  damaged.pop_back();
  refused(library, artifact, damaged, "its length is wrong");
  refused(library, artifact, Bytes(kConstantsFileBytes, 0), "it does not hold tuning constants");
}

/// One rank whose NCCL has other constants, so that ours are out of bounds there: none takes them.
void one_rank_that_objects_keeps_all_from_them(const Library& library,
                                               const ArtifactDirectory& artifact) {
  artifact.write_constants(1, kRanks, constants_of(1, kRanks, 3, 16.5));
  const ncclTunerConstants_v5_t own = own_constants();
  ncclTunerConstants_v5_t odd = own;
  odd.baseLatencies[1][0] = 0.1;
  library.constants.assign(kRanks, own);
  library.constants[2] = odd;
  CHECK(library.init(6, kRanks, 1) == nullptr && t_init_result == ncclSuccess);
  for (int rank = 0; rank < kRanks; ++rank) {
    CHECK(same(library.constants[static_cast<std::size_t>(rank)], rank == 2 ? odd : own));
  }
}

void an_nccl_that_shows_none_abstains(const Library& library, const ArtifactDirectory& artifact) {
  artifact.write_constants(1, kRanks, constants_of(1, kRanks, 3, 16.5));
  library.constants.clear();
  t_lines.clear();
  CHECK(library.init(4, kRanks, 1) == nullptr && t_init_result == ncclSuccess);
  CHECK(was_said("this NCCL shows none"));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) return 2;
  const Library library(argv[1]);
  const ArtifactDirectory artifact(argv[2], "constants");
  written_on_every_rank(library, artifact);
  what_is_absurd_is_refused(library, artifact);
  one_rank_that_objects_keeps_all_from_them(library, artifact);
  an_nccl_that_shows_none_abstains(library, artifact);
  return g_failures;
}
