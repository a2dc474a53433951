// A vendor's profiler behind ours hears what it would hear alone, call by call: the same sequence
// is played to each, every time in a process of its own, and what the vendor wrote down is
// compared.
#include <fstream>
#include <iterator>
#include <random>
#include <sstream>

#include "tests/vendor_runs.h"

namespace {

std::string read_file(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// Shows the first line that differs.
bool same(const std::string& alone, const std::string& chained) {
  std::istringstream first(alone), second(chained);
  std::string before, after;
  for (int line = 1;; ++line) {
    const bool has_first = static_cast<bool>(std::getline(first, before));
    const bool has_second = static_cast<bool>(std::getline(second, after));
    if (!has_first && !has_second) return true;
    if (has_first != has_second || before != after) {
      std::fprintf(stderr, "line %d\n  alone:   %s\n  chained: %s\n", line,
                   has_first ? before.c_str() : "-", has_second ? after.c_str() : "-");
      return false;
    }
  }
}

/// What the vendor hears of `play` alone, and behind ours under `ours`.
std::string compare(const std::string& vendor, int release, const Settings& theirs,
                    const Settings& ours, const std::function<void(NcclEvents*)>& play) {
  std::string logs[2];
  for (const bool is_chained : {false, true}) {
    const std::string log = g_build + "/vendor-" + std::to_string(getpid()) + ".log";
    Settings settings = theirs;
    settings.emplace_back("VENDOR_LOG", log);
    if (is_chained) {
      settings.insert(settings.end(), ours.begin(), ours.end());
      settings.emplace_back("DYNAMICCL_NEXT_PROFILER", vendor_path(vendor));
    }
    apart(settings, [&] {
      NcclEvents nccl(is_chained ? g_ours.c_str() : vendor_path(vendor).c_str(), release);
      play(&nccl);
    });
    logs[is_chained ? 1 : 0] = read_file(log);
    unlink(log.c_str());
  }
  CHECK(same(logs[0], logs[1]));
  return logs[1];
}

/// A part of the runs has to do under a sanitizer, whose processes start slowly.
const bool g_is_few = std::getenv("DYNAMICCL_FEW") != nullptr;

/// A job's worth of all that NCCL can report, the same for the same seed. It captures only where
/// ours takes no times: NCCL counts a captured call only while somebody asks for KernelCh.
void play_all(NcclEvents* nccl, unsigned seed, bool captures) {
  std::mt19937 random(seed);
  Comm comms[2] = {nccl->init(0xa, 1), nccl->init(0xb, 2)};
  std::vector<std::pair<int, Launch>> running;
  std::vector<Launch> graph[2];
  for (int i = 0; i < 120; ++i) {
    const int which = static_cast<int>(random() % 2);
    Comm* comm = &comms[which];
    std::vector<ApiCall> calls(1 + random() % 3);
    const bool captured = captures && random() % 16 == 0;
    for (ApiCall& call : calls) {
      call = {random() % 4 == 0, captured, 1 + static_cast<int>(random() % 3)};
    }
    std::vector<Launch> launches = nccl->call(comm, calls);
    nccl->launch(comm, &launches);
    for (const Launch& launch : launches) running.emplace_back(which, launch);
    if (captured) graph[which] = launches;
    if (random() % 4 == 0 && !graph[which].empty()) {
      nccl->launch(comm, &graph[which], true);
      for (const Launch& launch : graph[which]) running.emplace_back(which, launch);
    }
    if (random() % 4 == 0) nccl->control(*comm);
    if (random() % 4 == 0) nccl->copy(comm);
    if (random() % 8 == 0) nccl->progress(*comm, launches[0], 1);  // for another process
    while (running.size() > random() % 6) {
      nccl->progress(comms[running[0].first], running[0].second);
      running.erase(running.begin());
    }
    if (i == 60) {  // one goes and another comes, in the same memory of ours
      for (const auto& [owner, launch] : running) nccl->progress(comms[owner], launch);
      running.clear();
      graph[0].clear();
      nccl->finalize(&comms[0]);
      comms[0] = nccl->init(0xc, 3);
    }
  }
  for (const auto& [owner, launch] : running) nccl->progress(comms[owner], launch);
  for (Comm& comm : comms) nccl->finalize(&comm);
}

void hears_what_it_would_alone() {
  const int masks[] = {kEverything,
                       ncclProfileColl | ncclProfileKernelCh,  // NVIDIA's Inspector's
                       ncclProfileColl,
                       ncclProfileKernelCh,
                       ncclProfileP2p | ncclProfileGroup,
                       ncclProfileNetPlugin,
                       ncclProfileProxyStep | ncclProfileProxyCtrl,
                       ncclProfileProxyOp | ncclProfileCeColl,
                       ncclProfileGroupApi | ncclProfileKernelLaunch,
                       ncclProfileCollApi | ncclProfileCeBatch,
                       ncclProfileP2pApi | ncclProfileCeSync};
  unsigned seed = 0;
  for (const auto& [vendor, release] : kAll) {
    for (const int mask : masks) {
      ++seed;
      if (g_is_few && seed % 4 != 0) continue;
      const char* percent = seed % 3 == 0 ? "100" : (seed % 3 == 1 ? "50" : "0");
      const Settings ours = {{"DYNAMICCL_SAMPLE_PERCENT", percent}};
      const auto play = [&](NcclEvents* nccl) { play_all(nccl, seed, seed % 3 == 2); };
      const std::string log =
          compare(vendor, release, {{"VENDOR_MASK", std::to_string(mask)}}, ours, play);
      const bool is_whole = mask == kEverything || (mask & ncclProfileColl) != 0;
      CHECK(!is_whole || log.size() > 10'000);
    }
    // No mask at all, no events; and ours wants none either.
    const auto play = [&](NcclEvents* nccl) { play_all(nccl, 7, true); };
    const std::string quiet = compare(vendor, release, {{"VENDOR_MASK", "0"}},
                                      {{"DYNAMICCL_SAMPLE_PERCENT", "100"}}, play);
    CHECK(quiet.find("start") == std::string::npos);
    for (const char* mode : {"sweep", "table-static"}) {
      compare(vendor, release, {{"VENDOR_MASK", std::to_string(kEverything)}},
              {{"DYNAMICCL_MODE", mode}}, play);
    }
  }
}

/// Events that it drops, and a communicator that it wants nothing of.
void gives_no_handles() {
  const int nulls[] = {ncclProfileGroup,
                       ncclProfileGroupApi | ncclProfileCollApi,
                       ncclProfileColl,
                       ncclProfileProxyOp | ncclProfileCeColl,
                       ncclProfileKernelCh | ncclProfileNetPlugin,
                       kEverything};
  for (const auto& [vendor, release] : kAll) {
    const auto play = [&](NcclEvents* nccl) { play_all(nccl, 11, false); };
    for (const int null : nulls) {
      compare(vendor, release,
              {{"VENDOR_MASK", std::to_string(kEverything)}, {"VENDOR_NULL", std::to_string(null)}},
              {{"DYNAMICCL_SAMPLE_PERCENT", "100"}}, play);
    }
    compare(vendor, release,
            {{"VENDOR_MASK", std::to_string(kEverything)}, {"VENDOR_NO_CONTEXT", "1"}}, {}, play);
  }
}

/// It changes its mask from within an event: the next call is the first to know.
void changes_its_mask() {
  std::mt19937 random(3);
  for (const auto& [vendor, release] : kAll) {
    for (int round = 0; round < (g_is_few ? 2 : 8); ++round) {
      std::string changes;
      for (int at = 1; at < 600; at += 1 + static_cast<int>(random() % 40)) {
        const int mask = 1 + static_cast<int>(random() % kEverything);
        changes += std::to_string(at) + ":" + std::to_string(mask) + ",";
      }
      compare(vendor, release, {{"VENDOR_MASK", "66"}, {"VENDOR_MASK_AT", changes}},
              {{"DYNAMICCL_SAMPLE_PERCENT", "50"}}, [&](NcclEvents* nccl) {
                Comm comm = nccl->init(0xa);
                for (int i = 0; i < 200; ++i) {
                  std::vector<Launch> launches = nccl->call(&comm, {{i % 5 == 0, false, 2}});
                  nccl->launch(&comm, &launches);
                  nccl->progress(comm, launches[0]);
                  if (i % 3 == 0) nccl->control(comm);
                  if (i % 7 == 0) nccl->copy(&comm);
                }
                nccl->finalize(&comm);
              });
    }
  }
}

/// Its mask is its own: neither what ours adds for a burst nor NCCL's whole one.
void masks_are_apart(const std::string& vendor, int release) {
  constexpr int kKernel = 6;  // the number of KernelCh's bit
  Settings settings = chained(vendor, ncclProfileColl);
  settings.emplace_back("DYNAMICCL_SAMPLE_PERCENT", "10");
  apart(settings, [&] {
    NcclEvents nccl(g_ours.c_str(), release);
    Comm comm = nccl.init(1);
    const VendorEvents* events = events_of(vendor);
    int timed = 0;
    for (int i = 0; i < 2000; ++i) timed += run_call(&nccl, &comm);
    CHECK(timed >= 160 && timed <= 300);  // ours
    CHECK(events->of_type[1] == 2000 && events->of_type[kKernel] == 0);
    CHECK(*events->mask == ncclProfileColl && nccl.mask() == asked_by_ours(release));
    // From outside. What was wanted when a call was made holds for all of the call.
    __atomic_store_n(events->mask.load(), 66, __ATOMIC_SEQ_CST);
    run_call(&nccl, &comm);
    const long before = events->of_type[kKernel];
    for (int i = 0; i < 2000; ++i) CHECK(run_call(&nccl, &comm));  // in bursts and between
    CHECK(events->of_type[kKernel] == before + 4000 && events->of_type[1] == 4001);
    CHECK(nccl.mask() == (66 | asked_by_ours(release)) && *events->mask == 66);
    __atomic_store_n(events->mask.load(), 0, __ATOMIC_SEQ_CST);
    run_call(&nccl, &comm);
    const long starts = events->starts;
    run_call(&nccl, &comm);
    CHECK(events->starts == starts);
    CHECK((nccl.mask() & ~ncclProfileKernelCh) == asked_by_ours(release));
    nccl.finalize(&comm);
    CHECK(events->finalized == 1 && events->open == 0);
  });
}

/// Ours wants nothing, and theirs wakes up: there is no event by which ours could hear of it.
void woken_from_outside(const std::string& vendor, int release) {
  Settings settings = chained(vendor, 0);
  settings.emplace_back("DYNAMICCL_DISABLE", "1");
  apart(settings, [&] {
    NcclEvents nccl(g_ours.c_str(), release);
    Comm comm = nccl.init(1);
    const VendorEvents* events = events_of(vendor);
    CHECK(events->mask == nccl.mask_pointer());
    run_call(&nccl, &comm);
    CHECK(events->starts == 0);
    __atomic_store_n(events->mask.load(), 2, __ATOMIC_SEQ_CST);
    run_call(&nccl, &comm);
    CHECK(events->of_type[1] == 1);
    nccl.finalize(&comm);
  });
}

}  // namespace

int main(int, char** arguments) {
  g_ours = arguments[1];
  g_build = arguments[2];
  const CallsDirectory calls(g_build, "next-profiler");  // so that ours has something to do
  hears_what_it_would_alone();
  gives_no_handles();
  changes_its_mask();
  for (const auto& [vendor, release] : kAll) {
    masks_are_apart(vendor, release);
    woken_from_outside(vendor, release);
  }
  return g_failures;
}
