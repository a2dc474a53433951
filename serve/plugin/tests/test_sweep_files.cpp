// Sweep mode's files: whatever lies on disk, a communicator fails or plays, and never crashes.
// Chunk sizes, which the report tells of, are tested here as well.
#include <sys/stat.h>
#include <unistd.h>

#include <cctype>

#include "tests/check.h"
#include "tests/library.h"
#include "tests/schedule_file.h"

using namespace dynamiccl;

namespace {

/// Whether no communicator comes to be, and the one line says `why`.
bool fails(const Library& library, const std::string& why, std::size_t num_ranks = 8,
           std::size_t num_nodes = 1, const std::vector<int>& versions = {3, 4, 5, 6}) {
  bool all = true;
  for (const int version : versions) {
    t_lines.clear();
    void* context = library.init(version, num_ranks, num_nodes);
    const bool said = t_lines.size() == 1 && t_lines[0].find("DYNAMICCL: ") == 0 &&
                      t_lines[0].find("cannot sweep: ") != std::string::npos &&
                      t_lines[0].find(why) != std::string::npos;
    if (!said || context != nullptr || t_init_result != ncclInvalidUsage) {
      std::fprintf(stderr, "v%d said: %s\n", version, t_lines.empty() ? "-" : t_lines[0].c_str());
      all = false;
    }
    library.finalize(version, context);
    all &= library.init(version, num_ranks, num_nodes, nullptr, nullptr) == nullptr;
  }
  return all;
}

bool plays(const Library& library, int version = 5) {
  void* context = library.init(version, 8, 1);
  const bool made = context != nullptr && t_init_result == ncclSuccess;
  library.finalize(version, context);
  return made;
}

void wrong_communicator(const Library& library, const SweepDirectory& sweep) {
  sweep.write(schedule_of(Plan()));
  CHECK(plays(library));
  CHECK(fails(library, "another number of ranks or nodes", 16, 1));
  CHECK(fails(library, "another number of ranks or nodes", 1, 1));
  CHECK(fails(library, "another number of ranks or nodes", 8, 2));
  CHECK(fails(library, "needs NCCL 2.22", 8, 1, {2}));
  Plan chunks;
  chunks.configs[0].chunk_bytes = 1 << 16;
  sweep.write(schedule_of(chunks));
  CHECK(fails(library, "chunk sizes need NCCL 2.30", 8, 1, {3, 4, 5}));
  CHECK(plays(library, 6));
}

void wrong_environment(const Library& library, const SweepDirectory& sweep) {
  const Bytes bytes = schedule_of(Plan());
  sweep.write(bytes);
  std::string hash = hash_of(bytes);
  for (const char* other : {"0", "0000000000000000", (hash + "0").c_str(), hash.c_str() + 1}) {
    setenv("DYNAMICCL_SCHEDULE_HASH", other, 1);
    CHECK(fails(library, "its hash is not DYNAMICCL_SCHEDULE_HASH"));
  }
  for (char& digit : hash) digit = static_cast<char>(std::toupper(digit));
  setenv("DYNAMICCL_SCHEDULE_HASH", hash.c_str(), 1);
  CHECK(plays(library));
  setenv("DYNAMICCL_SCHEDULE_HASH", "", 1);
  CHECK(fails(library, "DYNAMICCL_SCHEDULE_HASH is not set"));
  setenv("DYNAMICCL_SCHEDULE_HASH", hash.c_str(), 1);
  unsetenv("DYNAMICCL_SCHEDULE");
  CHECK(fails(library, "DYNAMICCL_SCHEDULE is not set"));
  setenv("DYNAMICCL_SCHEDULE", std::string(9000, '%').c_str(), 1);
  CHECK(fails(library, "DYNAMICCL: "));
  setenv("DYNAMICCL_SCHEDULE", sweep.schedule().c_str(), 1);
}

void not_a_file(const Library& library, const SweepDirectory& sweep) {
  const std::string path = sweep.schedule();
  std::remove(path.c_str());
  CHECK(fails(library, "it cannot be opened"));
  mkdir(path.c_str(), 0777);
  CHECK(fails(library, "it cannot be read"));
  rmdir(path.c_str());
  mkfifo(path.c_str(), 0666);  // must not block
  CHECK(fails(library, "it is too short"));
  std::remove(path.c_str());
  CHECK(symlink("/dev/zero", path.c_str()) == 0);
  CHECK(fails(library, "it is too long"));
  std::remove(path.c_str());
}

void damaged_files(const Library& library, const SweepDirectory& sweep) {
  const Bytes good = schedule_of(Plan());
  for (std::size_t size = 0; size < good.size(); ++size) {
    sweep.write(Bytes(good.begin(), good.begin() + static_cast<std::ptrdiff_t>(size)));
    setenv("DYNAMICCL_SCHEDULE_HASH", hash_of(good).c_str(), 1);
    CHECK(fails(library, "/schedule: "));
  }
  for (std::size_t bit = 0; bit < 8 * good.size(); ++bit) {
    Bytes flipped = good;
    flipped[bit / 8] = static_cast<std::uint8_t>(flipped[bit / 8] ^ 1U << bit % 8);
    sweep.write(flipped);  // its hash is told as it stands in the file
    CHECK(fails(library, "/schedule: ", 8, 1, {5}));
  }
  Bytes longer = good;
  longer.push_back(0);
  sweep.write(longer);
  CHECK(fails(library, "length"));
}

/// Checksums that match do not make the numbers right: every field is checked on its own.
void resealed_files(const Library& library, const SweepDirectory& sweep) {
  const Bytes good = schedule_of(Plan());
  const int odd_values[] = {-1, 0, 9, 1 << 13, 1 << 25, 0x7fffffff, static_cast<int>(0x80000000)};
  for (std::size_t offset = 8; offset < good.size() - 8; offset += 4) {
    for (const int odd : odd_values) {
      Bytes bad(good.begin(), good.end() - 8);
      for (std::size_t i = 0; i < 4; ++i) {
        bad[offset + i] = static_cast<std::uint8_t>(static_cast<std::uint32_t>(odd) >> (8 * i));
      }
      sweep.write(sealed(bad));
      const bool in_header = offset < kScheduleHeaderBytes;
      const bool may_fit = (offset == 28 && odd > 0 && odd <= kMaxCalls);  // calls_per_half
      if (in_header && !may_fit) {
        CHECK(fails(library, "/schedule: ", 8, 1, {5}));
      } else {
        library.finalize(5, library.init(5, 8, 1));  // may fit; a sanitizer watches
      }
    }
  }
}

void numbers_outside_the_vocabulary(const Library& library, const SweepDirectory& sweep) {
  const Entry bad_configs[] = {
      {7, kLL, 8, 1, 0},      {-2, kLL, 8, 1, 0},       {kRing, 3, 8, 1, 0},
      {kRing, -2, 8, 1, 0},   {kRing, kLL, 65, 1, 0},   {kRing, kLL, -3, 1, 0},
      {kRing, kLL, 8, 2, 0},  {kRing, kLL, 8, 0, 0},    {kAuto, kAuto, 0, 1, 0},
      {kRing, kLL, 8, 1, -1}, {kPAT, kSimple, 8, 1, 0}, {kNVLS, kLL, 8, 1, 0},
  };
  for (const Entry& bad : bad_configs) {
    Plan plan;
    plan.configs[1] = bad;
    sweep.write(schedule_of(plan));
    CHECK(fails(library, "a config is outside the vocabulary"));
  }
  Plan plan;
  plan.blocks[3] = 3;
  sweep.write(schedule_of(plan));
  CHECK(fails(library, "a block has no config"));
  for (const std::uint64_t size : {std::uint64_t{0}, std::uint64_t{1} << 62, ~std::uint64_t{0}}) {
    plan = Plan();
    plan.sizes[1] = size;
    sweep.write(schedule_of(plan));
    CHECK(fails(library, "a size is out of range"));
    plan = Plan();
    plan.warmup[1].size_bytes = size;
    sweep.write(schedule_of(plan));
    CHECK(fails(library, "a warm-up run is out of range"));
    plan = Plan();
    plan.warmup[1].num_calls = size;
    sweep.write(schedule_of(plan));
    CHECK(fails(library, "a warm-up run is out of range"));
  }
}

void reports(const Library& library, const SweepDirectory& sweep) {
  const Bytes schedule = schedule_of(Plan());
  sweep.write(schedule);
  sweep.ask_for_report();
  t_lines.clear();
  void* first = library.init(5, 8, 1);
  void* second = library.init(5, 8, 1);
  CHECK(t_lines.size() == 2);
  CHECK(t_lines[0].find("reports to") != std::string::npos);
  CHECK(t_lines[1].find("report") == std::string::npos);
  const Bytes begun = sweep.read_report();
  CHECK(begun.size() == kReportHeaderBytes + 4 * 5 && report_calls(begun) == 0);
  CHECK(report_number(begun, 16, 8) == report_number(schedule, schedule.size() - 8, 8));
  Call call;
  call.size_bytes = 1024;
  library.ask(5, second, call);  // plays, and tells nobody
  CHECK(report_calls(sweep.read_report()) == 0);
  library.ask(5, first, call);
  CHECK(report_calls(sweep.read_report()) == 1);
  library.finalize(5, second);
  library.finalize(5, first);
  CHECK(report_calls(sweep.read_report()) == 1);

  setenv("DYNAMICCL_SWEEP_REPORT", (sweep.report() + "/nowhere").c_str(), 1);
  t_lines.clear();
  CHECK(plays(library));
  CHECK(t_lines.size() == 2);
  CHECK(t_lines[0].find("no sweep report: ") != std::string::npos);
  CHECK(t_lines[0].find("it cannot be created") != std::string::npos);
}

/// Between the synchronising calls nothing is stored unless the state changes.
void timed_calls_leave_the_report_alone(const Library& library, const SweepDirectory& sweep) {
  Plan plan;
  plan.warmup = {{1024, 2}};
  sweep.write(schedule_of(plan));
  sweep.ask_for_report();
  void* context = library.init(5, 8, 1);
  Call call;
  call.size_bytes = 1024;
  const std::uint64_t expected[] = {1, 2, 3, 3, 3, 3, 7, 7, 7, 7};
  for (const std::uint64_t calls : expected) {
    library.ask(5, context, call);
    CHECK(report_calls(sweep.read_report()) == calls);
  }
  library.finalize(5, context);
  CHECK(report_calls(sweep.read_report()) == 10);
}

void chunk_sizes(const Library& library, const SweepDirectory& sweep) {
  Plan plan;
  plan.warmup.clear();
  plan.sizes = {1024};
  plan.calls_per_half = 1;
  plan.configs = {{kRing, kSimple, 8, 1, 100000},
                  {kTree, kLL128, 8, 1, 5},
                  {kRing, kLL, 8, 1, 0},
                  {kAuto, kAuto, 0, 1, 4096}};
  plan.blocks = {0, 1, 2, 3};
  sweep.write(schedule_of(plan));
  sweep.ask_for_report();
  void* context = library.init(6, 8, 1);
  Call call;
  call.size_bytes = 1024;
  const std::size_t own = 1 << 19;
  CHECK(library.chunk(context, kAllReduce, kRing, kSimple, own) == own);  // before any question

  library.ask(6, context, call);
  for (int part = 0; part < 3; ++part) {  // 100000 rounded down to a multiple of 512
    CHECK(library.chunk(context, kAllReduce, kRing, kSimple, own) == 99840);
  }
  CHECK(library.chunk(context, kAllReduce, kRing, kSimple, 70000) == 69632);  // never more than own
  CHECK(library.chunk(context, kAllReduce, kRing, kSimple, 100) == 100);      // less than a grain
  CHECK(library.chunk(context, kReduce, kRing, kSimple, own) == own);
  CHECK(library.chunk(context, kAllReduce, kTree, kSimple, own) == own);
  CHECK(library.chunk(context, kAllReduce, kRing, kLL, own) == own);
  CHECK(library.chunk(context, kAllReduce, -1, 5, own) == own);
  library.ask(6, context, call);
  CHECK(library.chunk(context, kAllReduce, kRing, kSimple, own) == 99840);

  library.ask(6, context, call);  // two questions: the chunks may be about either
  library.ask(6, context, call);
  CHECK(library.chunk(context, kAllReduce, kTree, kLL128, own) == own);
  library.ask(6, context, call);  // block 2 has no chunk size
  CHECK(library.chunk(context, kAllReduce, kRing, kLL, own) == own);
  library.ask(6, context, call);
  CHECK(library.chunk(context, kAllReduce, kRing, kLL, own) == own);

  call.costs[3] = 1.0F;  // Ring/LL wins: its grain holds
  library.ask(6, context, call);
  CHECK(library.chunk(context, kAllReduce, kRing, kLL, 4100) == 4096);
  call.costs.assign(21, -1.0F);
  library.ask(6, context, call);  // unavailable: NCCL's own chunk too
  CHECK(library.chunk(context, kAllReduce, kRing, kLL, own) == own);
  library.ask(6, context, call);  // past the end
  CHECK(library.chunk(context, kAllReduce, kRing, kLL, own) == own);
  library.finalize(6, context);
  const Bytes report = sweep.read_report();
  const std::uint64_t chunks[] = {69632, 0, 0, 4096};
  for (std::size_t i = 0; i < 4; ++i) CHECK(report_chunk(report, i) == chunks[i]);
}

void chunks_below_a_grain(const Library& library, const SweepDirectory& sweep) {
  const std::size_t grains[] = {16, 1920, 512};
  for (const int protocol : {kLL, kLL128, kSimple}) {
    Plan plan;
    plan.warmup.clear();
    plan.sizes = {1024};
    plan.configs = {{kRing, static_cast<std::int8_t>(protocol), 8, 1, 1}};
    plan.blocks = {0};
    sweep.write(schedule_of(plan));
    void* context = library.init(6, 8, 1);
    Call call;
    call.size_bytes = 1024;
    library.ask(6, context, call);
    CHECK(library.chunk(context, kAllReduce, kRing, protocol, 1 << 19) == grains[protocol]);
    call.size_bytes = 2048;
    library.ask(6, context, call);  // not in the schedule: nothing is played any more
    CHECK(library.chunk(context, kAllReduce, kRing, protocol, 1 << 19) == 1 << 19);
    library.finalize(6, context);
  }
}

}  // namespace

int main(int, char** arguments) {
  const Library library(arguments[1], 1);
  const SweepDirectory sweep(arguments[2], "files");
  wrong_communicator(library, sweep);
  wrong_environment(library, sweep);
  not_a_file(library, sweep);
  damaged_files(library, sweep);
  resealed_files(library, sweep);
  numbers_outside_the_vocabulary(library, sweep);
  reports(library, sweep);
  timed_calls_leave_the_report_alone(library, sweep);
  chunk_sizes(library, sweep);
  chunks_below_a_grain(library, sweep);
  return g_failures;
}
