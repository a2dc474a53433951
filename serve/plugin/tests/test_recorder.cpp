// The recorder under threads, wrong handles, a fork, and tuners that hook into it. It is made of
// the adaptive library's own parts; what it records of NCCL's events is in tests/collect/calls.
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <thread>
#include <vector>

#include "adaptive/exports.cpp"
#include "tests/check.h"

extern "C" const ncclProfiler_v5_t ncclProfiler_v5;
using namespace dynamiccl;

namespace {

Profiler* create(std::uint64_t comm_id, int rank = 0) {
  static int mask = 0;
  void* context = nullptr;
  ncclProfiler_v5.init(&context, comm_id, &mask, "", 2, 8, rank, nullptr);
  return static_cast<Profiler*>(context);
}

void* start(Profiler* of, unsigned type, void* parent, ncclProfilerEventDescr_v5_t event = {}) {
  event.type = type;
  event.parentObj = parent;
  void* handle = nullptr;
  ncclProfiler_v5.startEvent(of, &handle, &event);
  return handle;
}

/// A call as NCCL 2.28 tells of it; null unless its channels will be reported.
void* call(Profiler* of, std::uint64_t sequence, bool is_captured = false) {
  ncclProfilerEventDescr_v5_t event = {};
  event.collApi.graphCaptured = is_captured;
  void* api = start(of, ncclProfileCollApi, start(of, ncclProfileGroupApi, nullptr), event);
  event.coll = {sequence, "AllReduce", nullptr, nullptr, 1, 0, "ncclFloat32", 2, 1, "RING", "LL"};
  return start(of, ncclProfileColl, api, event);
}

void* run_kernel(Profiler* profiler, void* coll, int channel, std::uint64_t begin_ns) {
  ncclProfilerEventDescr_v5_t event = {};
  event.kernelCh = {static_cast<std::uint8_t>(channel), begin_ns};
  void* kernel = start(profiler, ncclProfileKernelCh, coll, event);
  ncclProfilerEventStateArgs_v4_t stop = {{begin_ns + 100}};
  ncclProfiler_v5.recordEventState(kernel, ncclProfilerKernelChStop, &stop);
  return kernel;
}

struct Entry : CallRecord {
  std::uint32_t dropped, checksum;
};

/// What the process's file has of these communicators.
std::vector<Entry> entries(std::uint64_t first_id, std::uint64_t last_id) {
  std::vector<Entry> found;
  std::ifstream file(std::filesystem::directory_iterator(getenv("DYNAMICCL_CALLS_DIR"))->path(),
                     std::ios::binary);
  Entry entry;
  for (file.seekg(512); file.read(reinterpret_cast<char*>(&entry), sizeof entry);) {
    if (entry.comm_id >= first_id && entry.comm_id <= last_id) found.push_back(entry);
  }
  return found;
}

/// Ranks that share a process call, and a proxy thread reports; communicators come and go.
void many_threads() {
  constexpr std::uint64_t kThreads = 4, kEach = 5, kCalls = 200;
  std::vector<std::thread> ranks;
  for (std::uint64_t first = 0; first < kThreads * kEach; first += kEach) {
    ranks.emplace_back([first] {
      for (std::uint64_t id = first; id < first + kEach; ++id) {
        Profiler* profiler = create(id, static_cast<int>(first));
        for (std::uint64_t i = 0; i < kCalls; ++i) {
          void* coll = call(profiler, i);
          std::thread proxy(run_kernel, profiler, coll, 1, 1000 * (i + 1));
          run_kernel(profiler, coll, 0, 1000 * (i + 1) + 1);
          proxy.join();
        }
        ncclProfiler_v5.finalize(profiler);
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  std::vector<int> seen(kThreads * kEach * kCalls);
  std::size_t timed = 0;
  for (const Entry& entry : entries(0, kThreads * kEach - 1)) {
    ++seen.at(entry.comm_id * kCalls + entry.sequence);
    CHECK(entry.rank == static_cast<int>(entry.comm_id / kEach * kEach) && entry.flags == 0);
    if (entry.start_ns == 0) continue;  // another one's end narrowed the mask
    ++timed;
    CHECK(entry.start_ns == 1000 * (entry.sequence + 1) && entry.stop_ns == entry.start_ns + 101);
  }
  CHECK(seen == std::vector<int>(seen.size(), 1) && timed > seen.size() / 2);
}

/// Nobody waits for the writer: what finds no room is counted, and the rest is whole.
void too_many_for_the_writer() {
  constexpr std::uint64_t kEach = 100'000;
  const auto push = [](std::uint64_t count) {
    CallRecord record = {};
    record.comm_id = 1000;
    for (; record.sequence < count; ++record.sequence) {
      record.stop_ns = ~record.sequence;
      Recorder::push(record);
    }
  };
  Recorder::acquire(0, nullptr);
  std::thread producers[] = {std::thread(push, kEach), std::thread(push, kEach),
                             std::thread(push, kEach)};
  for (std::thread& producer : producers) producer.join();
  Recorder::release();  // all is written
  Recorder::acquire(0, nullptr);
  push(1);  // says what was dropped last
  Recorder::release();
  const std::vector<Entry> kept = entries(1000, 1000);
  std::uint64_t dropped = 0;
  for (const Entry& entry : kept) {
    dropped += entry.dropped;
    CHECK(entry.stop_ns == ~entry.sequence);
  }
  CHECK(dropped > 0 && kept.size() + dropped == 3 * kEach + 1);
}

/// Wrong handles are nobody's; a forked child, which has no writer, waits for none.
void wrong_handles_and_a_fork() {
  Profiler* profiler = create(50);
  for (std::uint64_t i = 0, bits = 1; i < 20'000; ++i) {
    bits = bits * 6364136223846793005U + 1442695040888963407U;
    run_kernel(profiler, reinterpret_cast<void*>(i % 2 == 0 ? bits : bits >> 40), i % 256, bits);
  }
  const pid_t child = fork();
  if (child == 0) {
    call(profiler, 0);
    ncclProfiler_v5.finalize(profiler);
    _exit(create(50) == nullptr ? 0 : 1);
  }
  int status = 1;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
  CHECK(run_kernel(profiler, call(profiler, 1), 64, 1) == nullptr);  // there is no such channel
  ncclProfiler_v5.finalize(profiler);
  CHECK(entries(50, 50).size() == 1);
}

/// Profilers are used again, and NCCL ends either of a communicator's two plugins first, while its
/// proxy thread still reports: no hook runs in a tuner that is gone, nor in another communicator's.
void tuners_come_and_go() {
  constexpr std::uint64_t kFirst = 10'000, kEach = 150, kCalls = 10;
  const auto play_rank = [](std::uint64_t first) {
    Switching* before = nullptr;  // whose profiler is used again
    for (std::uint64_t id = first; id < first + kEach; ++id) {
      Profiler* profiler = create(id);
      const Communicator communicator = {2, 1, nullptr, nullptr, id};
      call(profiler, 0);  // before it has a tuner
      auto* tuner = new (std::malloc(sizeof(Switching))) Switching({communicator}, profiler);
      if (before != nullptr) before->retire();
      std::vector<void*> colls;
      for (std::uint64_t i = 1; i <= kCalls; ++i) colls.push_back(call(profiler, i));
      std::thread proxy([profiler, &colls] {
        for (const int channel : {0, 1}) {
          for (void* coll : colls) run_kernel(profiler, coll, channel, 1000);
        }
      });
      before = id % 2 == 0 ? nullptr : tuner;
      if (before == nullptr) {
        tuner->retire();
        call(profiler, kCalls + 1);
      }
      proxy.join();
      ncclProfiler_v5.finalize(profiler);
    }
    before->retire();
  };
  std::thread other(play_rank, kFirst + kEach);
  play_rank(kFirst);
  other.join();
  const std::vector<Entry> kept = entries(kFirst, kFirst + 2 * kEach - 1);
  CHECK(kept.size() == 2 * kEach * (kCalls + 1) + kEach);
  CHECK(std::all_of(kept.begin(), kept.end(), [](const Entry& entry) {
    const bool has_tuner = entry.sequence >= 1 && entry.sequence <= kCalls;
    return (entry.flags & kFlagProbe) == (has_tuner ? kFlagProbe : 0);
  }));
}

/// What the adaptive tuner is told and hooks into.
void what_the_tuner_uses() {
  setenv("DYNAMICCL_SAMPLE_PERCENT", "1", 1);
  Profiler* profiler = create(77, 5);
  CHECK(take_created(77) == profiler && take_created(77) == nullptr);  // once
  ncclProfiler_v5.finalize(create(78));
  CHECK(take_created(77) == nullptr);  // the latest is another one
  static CallRecord last;
  std::uint32_t table = 9;
  profiler->tuner = &table;
  static constexpr Hooks kHooks = {[](const Profiler& of, CallRecord* record) {
                                     record->table = *static_cast<std::uint32_t*>(of.tuner);
                                   },
                                   [](const Profiler& of, const CallRecord& record) {
                                     CHECK(of.tuner != nullptr);
                                     last = record;
                                   }};
  g_hooks.store(&kHooks);
  call(profiler, 0);
  CHECK(last.comm_id == 77 && last.rank == 5 && last.table == 9);
  call(profiler, 1, true);  // which table it was chosen by is not known
  CHECK(last.flags == kFlagCaptured && last.table == 0);
  profiler->take_times(true);
  void* timed = nullptr;
  for (std::uint64_t i = 1597; i < 1620; ++i) CHECK((timed = call(profiler, i)) != nullptr);
  profiler->take_times(false);  // the burst in between has not ended it
  CHECK(call(profiler, 3) == nullptr);
  for (int channel : {0, 1}) run_kernel(profiler, timed, channel, 1000);
  CHECK(last.sequence == 1619 && last.stop_ns == 1100 && last.table == 9);
  ncclProfiler_v5.finalize(profiler);
}

}  // namespace

int main(int, char** arguments) {
  const auto folder = std::filesystem::path(arguments[2]) / "calls-recorder";
  std::filesystem::remove_all(folder);
  setenv("DYNAMICCL_CALLS_DIR", folder.c_str(), 1);
  setenv("DYNAMICCL_SAMPLE_PERCENT", "100", 1);
  many_threads();
  too_many_for_the_writer();
  wrong_handles_and_a_fork();
  tuners_come_and_go();
  what_the_tuner_uses();
  return g_failures != 0;
}
