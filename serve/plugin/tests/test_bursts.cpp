// Which calls have their GPU time taken: the same on every rank, few, and none that are captured.
#include <cstdlib>
#include <set>
#include <string>

#include "profiler/bursts.h"
#include "tests/calls_files.h"
#include "tests/check.h"
#include "tests/profiler_driver.h"

using namespace dynamiccl;

namespace {

void percents() {
  CHECK(sample_ppm_of("1") == 10'000);
  CHECK(sample_ppm_of("0.25") == 2'500);
  CHECK(sample_ppm_of("12.5") == 125'000);
  CHECK(sample_ppm_of("100") == 1'000'000);
  CHECK(sample_ppm_of("0") == 0);
  CHECK(sample_ppm_of("0.00001") == 0);
  for (const char* wrong : {"", ".", "-1", "1%", "1,5", "100.1", "1e2", "99999999999999999999"}) {
    CHECK(sample_ppm_of(wrong) == -1);
  }
  CHECK(burst_period(0) == 0 && burst_period(10'000) == 100 && burst_period(1'000'000) == 1);
  CHECK(burst_period(300'000) == 3);
}

void membership() {
  CHECK(!in_burst(0, 100) && !in_burst(15, 100));  // the warm-up
  CHECK(!in_burst(1599, 100) && in_burst(1600, 100) && in_burst(1615, 100) && !in_burst(1616, 100));
  CHECK(in_burst(0, 1) && in_burst(12345, 1));
  CHECK(!in_burst(1600, 0));
}

/// The sequence numbers, of those called, for which the mask was wide.
std::set<std::uint64_t> sampled(ProfilerDriver* nccl, ProfilerDriver::Comm* comm, int calls,
                                const ProfiledCall& call = {}) {
  std::set<std::uint64_t> wide;
  for (int i = 0; i < calls; ++i) {
    const std::uint64_t sequence = comm->sequence[kAllReduce];
    const Launched launched = nccl->call(comm, call);
    if (launched.num_kernels > 0) wide.insert(sequence);
    nccl->run_kernels(launched, 100, 200);
  }
  return wide;
}

void whole_bursts(const char* path, int version) {
  ProfilerDriver driver(path, version);
  ProfilerDriver* const nccl = &driver;
  ProfilerDriver::Comm comm = nccl->init(1);
  CHECK((nccl->mask() & ~ncclProfileKernelLaunch) == ncclProfileColl);
  const std::set<std::uint64_t> wide = sampled(nccl, &comm, 5000);
  std::set<std::uint64_t> expected;
  for (std::uint64_t sequence = 0; sequence < 5000; ++sequence) {
    if (in_burst(sequence, 100)) expected.insert(sequence);
  }
  CHECK(wide == expected && wide.size() == 48);
  CHECK((nccl->mask() & ~ncclProfileKernelLaunch) == ncclProfileColl);
  nccl->finalize(&comm);
}

void other_shares(const char* path, int version) {
  ProfilerDriver driver(path, version);
  ProfilerDriver* const nccl = &driver;
  setenv("DYNAMICCL_SAMPLE_PERCENT", "0", 1);
  ProfilerDriver::Comm never = nccl->init(1);
  CHECK(sampled(nccl, &never, 4000).empty());
  setenv("DYNAMICCL_SAMPLE_PERCENT", "ten", 1);
  t_lines.clear();
  ProfilerDriver::Comm wrong = nccl->init(2);
  CHECK(sampled(nccl, &wrong, 4000).empty());
  CHECK(t_lines.size() == 1 &&
        t_lines[0].find("DYNAMICCL_SAMPLE_PERCENT is not a number") != std::string::npos);
  nccl->finalize(&never);
  nccl->finalize(&wrong);
  setenv("DYNAMICCL_SAMPLE_PERCENT", "100", 1);
  ProfilerDriver::Comm always = nccl->init(3);
  CHECK(nccl->is_wide());
  CHECK(sampled(nccl, &always, 200).size() == 200);
  nccl->finalize(&always);
  CHECK(!nccl->is_wide());
  unsetenv("DYNAMICCL_SAMPLE_PERCENT");
}

/// All calls of a group are made before the first of their events.
void groups(const char* path, int version, std::size_t size) {
  ProfilerDriver driver(path, version);
  ProfilerDriver* const nccl = &driver;
  ProfilerDriver::Comm comm = nccl->init(1);
  std::size_t wide = 0;
  const std::size_t groups = 9600 / size;
  for (std::size_t group = 0; group < groups; ++group) {
    std::vector<Task> tasks;
    for (std::size_t i = 0; i < size; ++i) tasks.push_back(nccl->append(comm, {}));
    for (const Launched& launched : nccl->launch(&comm, tasks)) {
      wide += launched.num_kernels > 0;
      nccl->run_kernels(launched, 100, 200);
    }
  }
  CHECK(wide > 0 && wide <= 9600 / 100 + 64 + size);
  nccl->finalize(&comm);
  CHECK(!nccl->is_wide());
}

/// A burst that never ends costs no more than the allowance, whoever pays it.
void budget(const char* path, int version) {
  ProfilerDriver driver(path, version);
  ProfilerDriver* const nccl = &driver;
  ProfilerDriver::Comm stalled = nccl->init(1), busy = nccl->init(2);
  sampled(nccl, &stalled, 1604);
  CHECK(nccl->is_wide());
  const std::set<std::uint64_t> wide = sampled(nccl, &busy, 1500);
  CHECK(!nccl->is_wide() && !wide.empty() && wide.size() < 100);
  sampled(nccl, &stalled, 7900);
  CHECK(!nccl->is_wide());
  nccl->finalize(&stalled);
  sampled(nccl, &busy, 105);
  nccl->finalize(&busy);
  // Sends and receives count as well.
  ProfilerDriver other_driver(path, version);
  ProfilerDriver* const other = &other_driver;
  ProfilerDriver::Comm comm = other->init(1);
  sampled(other, &comm, 1604);
  CHECK(other->is_wide());
  for (int i = 0; i < 200; ++i) other->start_p2p(comm);
  CHECK(!other->is_wide());
  other->finalize(&comm);
}

void one_goes_while_another_holds(const char* path, int version) {
  ProfilerDriver driver(path, version);
  ProfilerDriver* const nccl = &driver;
  ProfilerDriver::Comm first = nccl->init(1), second = nccl->init(2);
  sampled(nccl, &second, 1599);
  sampled(nccl, &first, 1600);
  sampled(nccl, &second, 1);
  CHECK(nccl->is_wide());
  nccl->finalize(&first);
  CHECK(nccl->is_wide());
  nccl->finalize(&second);
  CHECK(!nccl->is_wide());
}

/// A capture ends a burst at once, and the replays begin none: their number stands still.
void capture(const char* path, int version) {
  ProfilerDriver driver(path, version);
  ProfilerDriver* const nccl = &driver;
  ProfilerDriver::Comm comm = nccl->init(1);
  ProfiledCall captured;
  captured.captured = true;
  sampled(nccl, &comm, 1599);
  for (int i = 0; i < 3; ++i) nccl->call(&comm, captured);
  CHECK(version == 4 || !nccl->is_wide());
  // 2.27 does not tell of a capture: a burst may begin in one, and goes as far as any other.
  CHECK(sampled(nccl, &comm, 40, captured).size() <= (version == 4 ? kBurstCalls : 0));
  CHECK(!nccl->is_wide());
  ProfilerDriver::Comm other = nccl->init(2);
  sampled(nccl, &other, 1602);
  CHECK(nccl->is_wide());
  nccl->call(&other, captured);
  CHECK(version == 4 || !nccl->is_wide());
  nccl->finalize(&comm);
  nccl->finalize(&other);
}

}  // namespace

int main(int count, char** arguments) {
  if (count == 3) {
    percents();
    membership();
    // In a process each: a process has few masks, and their budgets would add up.
    for (const char* test : {"whole", "shares", "groups", "budget", "holders", "capture"}) {
      for (const char* version : {"4", "5", "6"}) {
        const std::string command = std::string(arguments[0]) + " " + arguments[1] + " " +
                                    arguments[2] + " " + test + " " + version;
        CHECK(std::system(command.c_str()) == 0);
      }
    }
    return g_failures;
  }
  const std::string test = arguments[3];
  const int version = std::atoi(arguments[4]);
  const CallsDirectory calls(arguments[2], "bursts");
  if (test == "whole") whole_bursts(arguments[1], version);
  if (test == "shares") other_shares(arguments[1], version);
  if (test == "groups") {
    for (const std::size_t size : {4, 24, 64}) groups(arguments[1], version, size);
  }
  if (test == "budget") budget(arguments[1], version);
  if (test == "holders") one_goes_while_another_holds(arguments[1], version);
  if (test == "capture") capture(arguments[1], version);
  return g_failures;
}
