// A vendor's tuner behind ours: each vendor in a process of its own, since it is found only once.
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

#include "tests/check.h"
#include "tests/library.h"
#include "tests/table_file.h"
#include "tests/vendor_counts.h"

using namespace dynamiccl;

namespace {

std::string g_build;

struct Vendor {
  explicit Vendor(const std::string& name) {
    const std::string path = g_build + "/libvendor_" + name + ".so";
    setenv("DYNAMICCL_NEXT_TUNER", path.c_str(), 1);
    counts = static_cast<VendorCounts*>(dlsym(dlopen(path.c_str(), RTLD_NOW), "vendor_counts"));
  }
  VendorCounts* counts;
};

/// The cell that NCCL would take, and -1 when none is available.
int cheapest(const Call& call) {
  int best = -1;
  for (std::size_t i = 0; i < call.costs.size(); ++i) {
    const float cost = call.costs[i];
    if (cost < 0.0F) continue;
    if (best < 0 || cost < call.costs[static_cast<std::size_t>(best)]) best = static_cast<int>(i);
  }
  return best;
}

bool gives(const Call& after, int cell, int channels) {
  return after.result == ncclSuccess && cheapest(after) == cell && after.num_channels == channels;
}

/// One rank has a vendor's tuner that is asked first, and the other has none.
void both_or_none(const Library& with, const char* thin) {
  const Vendor vendor("v5");
  const Library without(thin, 1);
  void *ours = nullptr, *theirs = nullptr;
  std::vector<std::string> lines;
  std::thread other([&] {
    ours = without.init(6, 2, 1);
    lines = t_lines;
  });
  theirs = with.init(6, 2, 1);
  other.join();
  CHECK(ours == nullptr && lines.size() == 1);
  CHECK(lines[0].find("differs from the first in vendor's tuner") != std::string::npos);
  with.finalize(6, theirs);
}

/// From `version` of NCCL on a vendor's `name` is asked by its `theirs`.
void overrides_or_leaves(const Library& library, const std::string& name, int version, int theirs) {
  const Vendor vendor(name);
  setenv("VENDOR_CELL", "1", 1);
  void* context = library.init(version, 2, 1);
  CHECK(context != nullptr && vendor.counts->version == theirs && vendor.counts->inits == 2);
  if (theirs >= 5) CHECK(vendor.counts->comm_id > 100 && vendor.counts->constants != nullptr);
  // Ring/Simple is ours; theirs, before it, is not to win the tie nor to make Ring look relegated.
  CHECK(gives(library.ask(version, context, Call()), 5, 8));
  Call call;
  call.collective = kAllGather;  // our table leaves it
  CHECK(gives(library.ask(version, context, call), 1, 3));
  setenv("VENDOR_CELL", "20", 1);
  CHECK(gives(library.ask(version, context, Call()), 5, 8));
  Call symmetric;
  symmetric.num_pipe_ops = 0;  // about symmetric kernels: theirs stands
  CHECK(gives(library.ask(version, context, symmetric), 20, 3));
  Call barred;
  barred.costs[5] = -1.0F;  // ours cannot be had
  CHECK(gives(library.ask(version, context, barred), 20, 3));
  barred.costs[20] = -1.0F;
  if (theirs == 2) CHECK(cheapest(library.ask(version, context, barred)) == 0);
  setenv("VENDOR_CELL", "-1", 1);
  CHECK(gives(library.ask(version, context, Call()), 5, 8));
  CHECK(gives(library.ask(version, context, call), 0, 0));
  setenv("VENDOR_ERROR", "1", 1);
  CHECK(library.ask(version, context, Call()).result == ncclInvalidUsage);
  unsetenv("VENDOR_ERROR");
  const int calls = vendor.counts->calls;
  CHECK(calls == (theirs == 2 ? 9 : 8));
  CHECK(vendor.counts->finalized == 0);
  CHECK(library.finalize(version, context) == ncclSuccess && vendor.counts->finalized == 2);

  setenv("DYNAMICCL_DISABLE", "1", 1);
  setenv("VENDOR_CELL", "20", 1);
  context = library.init(version, 2, 1);
  CHECK(gives(library.ask(version, context, Call()), 20, 3));
  CHECK(library.finalize(version, context) == ncclSuccess);
  unsetenv("DYNAMICCL_DISABLE");
  setenv("VENDOR_INIT_ERROR", "1", 1);
  CHECK(library.init(version, 2, 1) == nullptr && t_init_result == ncclSystemError);
  unsetenv("VENDOR_INIT_ERROR");
  CHECK(vendor.counts->inits == 4 && vendor.counts->finalized == 4);
}

/// On NCCL 2.21 the vendor decides alone.
void version_2(const Library& library) {
  const Vendor vendor("v2");
  setenv("VENDOR_CELL", "2", 1);
  void* context = library.init(2, 2, 1);
  const Call after = library.ask(2, context, Call());
  CHECK(after.algorithm == kTree && after.protocol == kSimple && after.num_channels == 3);
  CHECK(vendor.counts->support == 1);
  CHECK(library.finalize(2, context) == ncclSuccess && vendor.counts->finalized == 2);
}

void chunks(const Library& library) {
  const Vendor vendor("v6");
  void* context = library.init(6, 2, 1);
  setenv("VENDOR_CHUNK", "4096", 1);
  library.ask(6, context, Call());
  CHECK(library.chunk(context, kAllReduce, kRing, kSimple, 1 << 19) == 4096);
  CHECK(library.chunk(context, kAllGather, kRing, kSimple, 1 << 19) == 4096);
  library.finalize(6, context);
  context = library.init(5, 2, 1);  // v6 is too new for it, v3 is taken
  CHECK(vendor.counts->version == 3);
  library.finalize(5, context);
}

std::atomic<int> g_lines{0};

/// Of all ranks: whichever looks for the vendor first says that it is not there.
void count_line(ncclDebugLogLevel, unsigned long, const char*, int, const char*, ...) { ++g_lines; }

void not_there(const Library& library) {
  for (const char* name : {"/nowhere/libvendor.so", "nobody"}) {
    setenv("DYNAMICCL_NEXT_TUNER", name, 1);
    g_lines = 0;
    void* context = library.init(6, 2, 1, nullptr, count_line);
    // One line of each rank says that it has the table; the other one comes once a process.
    CHECK(g_lines == (std::string(name) == "nobody" ? 2 : 3));
    CHECK(gives(library.ask(6, context, Call()), 5, 8));
    library.finalize(6, context);
  }
}

void itself(const Library& library, const char* path) {
  setenv("DYNAMICCL_NEXT_TUNER", path, 1);
  void* context = library.init(6, 2, 1);
  CHECK(gives(library.ask(6, context, Call()), 5, 8));
  library.finalize(6, context);
}

template <typename Run>
void apart(const char* path, const Run& run, std::size_t num_inits = 0) {
  const pid_t child = fork();
  if (child == 0) {
    begin_job();
    const Library library(path, num_inits);
    run(library);
    std::fflush(nullptr);
    _exit(g_failures != 0 ? 1 : 0);
  }
  int status = 1;
  waitpid(child, &status, 0);
  CHECK(status == 0);
}

}  // namespace

int main(int, char** arguments) {
  const char* path = arguments[1];
  g_build = arguments[2];
  const ArtifactDirectory artifact(arguments[2], "vendor");
  artifact.write(1, 2, table_of(1, 2, {kRing, kSimple, 8, 1, 1 << 16}));
  for (const int version : {3, 4, 5, 6}) {
    apart(path, [&](const Library& library) { overrides_or_leaves(library, "v2", version, 2); });
    apart(path, [&](const Library& library) { overrides_or_leaves(library, "v3", version, 3); });
  }
  for (const int version : {5, 6}) {
    apart(path, [&](const Library& library) { overrides_or_leaves(library, "v5", version, 5); });
  }
  apart(path, [&](const Library& library) { overrides_or_leaves(library, "v6", 6, 6); });
  const std::string thin = g_build + "/libnccl-tuner-dynamiccl.so";
  apart(path, [&](const Library& library) { both_or_none(library, thin.c_str()); }, 1);
  apart(path, version_2);
  apart(path, chunks);
  apart(path, not_there);
  apart(path, [&](const Library& library) { itself(library, path); });
  return g_failures;
}
