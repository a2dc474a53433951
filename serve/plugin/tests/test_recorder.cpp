// The recorder under threads, wrong handles, a fork, and a tuner that hooks into it. Links the
// plugin's own objects; what it records of NCCL's events is in tests/collect/calls.
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <thread>
#include <vector>

#include "profiler/created.h"
#include "profiler/profiler.h"
#include "tests/check.h"

extern "C" const ncclProfiler_v5_t ncclProfiler_v5;

using namespace dynamiccl;

namespace {

std::filesystem::path g_folder;

Profiler* create(std::uint64_t comm_id, int rank = 0) {
  static int mask = 0;
  void* context = nullptr;
  ncclProfiler_v5.init(&context, comm_id, &mask, "", 2, 8, rank, nullptr);
  return static_cast<Profiler*>(context);
}

void* start(Profiler* profiler, std::uint64_t type, void* parent,
            ncclProfilerEventDescr_v5_t event = {}) {
  event.type = type;
  event.parentObj = parent;
  void* handle = nullptr;
  ncclProfiler_v5.startEvent(profiler, &handle, &event);
  return handle;
}

/// A call as NCCL 2.28 tells of it; null unless its channels will be reported.
void* call(Profiler* profiler, std::uint64_t sequence, bool is_captured = false) {
  ncclProfilerEventDescr_v5_t event = {};
  event.collApi.graphCaptured = is_captured;
  void* group = start(profiler, ncclProfileGroupApi, nullptr);
  void* api = start(profiler, ncclProfileCollApi, group, event);
  event.coll = {sequence, "AllReduce", nullptr, nullptr, 1, 0, "ncclFloat32", 2, 1, "RING", "LL"};
  return start(profiler, ncclProfileColl, api, event);
}

/// Returns the handle of the kernel.
void* run_kernel(Profiler* profiler, void* coll, int channel, std::uint64_t begin_ns) {
  ncclProfilerEventDescr_v5_t event = {};
  event.kernelCh = {static_cast<std::uint8_t>(channel), begin_ns};
  void* kernel = start(profiler, ncclProfileKernelCh, coll, event);
  ncclProfilerEventStateArgs_v5_t stop = {{begin_ns + 100}};
  ncclProfiler_v5.recordEventState(kernel, ncclProfilerKernelChStop, &stop);
  ncclProfiler_v5.stopEvent(kernel);
  return kernel;
}

struct Entry {
  CallRecord record;
  std::uint32_t dropped, checksum;
};

/// What the process's file has of these communicators.
std::vector<Entry> entries(std::uint64_t first_id, std::uint64_t last_id) {
  std::vector<Entry> found;
  for (const auto& file : std::filesystem::directory_iterator(g_folder)) {
    std::ifstream stream(file.path(), std::ios::binary);
    const std::string bytes = {std::istreambuf_iterator<char>(stream), {}};
    for (std::size_t at = 512; at + sizeof(Entry) <= bytes.size(); at += sizeof(Entry)) {
      Entry entry;
      std::memcpy(&entry, bytes.data() + at, sizeof entry);
      const std::uint64_t id = entry.record.comm_id;
      if (id >= first_id && id <= last_id) found.push_back(entry);
    }
  }
  return found;
}

/// Ranks that share a process call, and a proxy thread reports; communicators come and go.
void many_threads() {
  constexpr std::uint64_t kThreads = 4, kRounds = 5, kCalls = 400;
  std::vector<std::thread> threads;
  for (std::uint64_t thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([thread] {
      for (std::uint64_t id = 100 + thread * kRounds; id < 100 + (thread + 1) * kRounds; ++id) {
        Profiler* profiler = create(id, static_cast<int>(thread));
        for (std::uint64_t i = 0; i < kCalls; i += 8) {
          void* colls[8];
          for (std::uint64_t j = 0; j < 8; ++j) colls[j] = call(profiler, i + j);
          const auto run = [&](int channel) {
            for (std::uint64_t j = 0; j < 8; ++j) {
              run_kernel(profiler, colls[j], channel, 1000 * (i + j + 1) + (channel == 0));
            }
          };
          std::thread proxy(run, 1);
          run(0);
          proxy.join();
        }
        ncclProfiler_v5.finalize(profiler);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::vector<int> seen(kThreads * kRounds * kCalls);
  std::uint64_t timed = 0;
  for (const Entry& entry : entries(100, 99 + kThreads * kRounds)) {
    const CallRecord& record = entry.record;
    const std::uint64_t communicator = record.comm_id - 100;
    ++seen.at(communicator * kCalls + record.sequence);
    CHECK(record.rank == static_cast<int>(communicator / kRounds) && record.flags == 0);
    if (record.start_ns == 0) continue;  // another one's end narrowed the mask
    ++timed;
    CHECK(record.start_ns == 1000 * (record.sequence + 1));
    CHECK(record.stop_ns == record.start_ns + 101);
  }
  CHECK(seen == std::vector<int>(seen.size(), 1) && timed > seen.size() / 2);
}

/// Nobody waits for the writer: what finds no room is counted, the rest is whole and in order.
void too_many_for_the_writer() {
  constexpr std::uint64_t kProducers = 3, kEach = 100'000;
  const auto push = [](std::uint64_t producer, std::uint64_t first, std::uint64_t end) {
    CallRecord record = {};
    record.comm_id = 1000 + producer;
    for (record.sequence = first; record.sequence < end; ++record.sequence) {
      record.stop_ns = ~record.sequence;
      Recorder::push(record);
    }
  };
  Recorder::acquire(0, nullptr);
  std::vector<std::thread> producers;
  for (std::uint64_t i = 0; i < kProducers; ++i) producers.emplace_back(push, i, 0, kEach);
  for (std::thread& thread : producers) thread.join();
  Recorder::release();  // all is written
  Recorder::acquire(0, nullptr);
  push(0, kEach, kEach + 1);  // says what was dropped last
  Recorder::release();
  std::uint64_t kept = 0, dropped = 0, next[kProducers] = {};
  for (const Entry& entry : entries(1000, 999 + kProducers)) {
    const CallRecord& record = entry.record;
    ++kept;
    dropped += entry.dropped;
    CHECK(record.stop_ns == ~record.sequence && record.sequence >= next[record.comm_id - 1000]);
    next[record.comm_id - 1000] = record.sequence + 1;
  }
  CHECK(dropped > 0 && kept + dropped == kProducers * kEach + 1);
}

/// Handles that we never gave out, and a channel that there is not.
void wrong_handles() {
  Profiler* profiler = create(1);
  std::uint64_t bits = 1;
  for (int i = 0; i < 20'000; ++i) {
    bits = bits * 6364136223846793005U + 1442695040888963407U;
    run_kernel(profiler, reinterpret_cast<void*>(i % 2 == 0 ? bits : bits >> 40), i % 256, bits);
  }
  CHECK(run_kernel(profiler, call(profiler, 0), 64, 1) == nullptr);
  ncclProfiler_v5.finalize(profiler);
  CHECK(entries(1, 1).size() == 1);
}

/// A child has none of the threads: it must neither wait for one nor record anything.
void forked_child() {
  Profiler* profiler = create(2);
  const pid_t child = fork();
  if (child == 0) {
    const bool is_nothing = create(2) == nullptr;
    call(profiler, 0);
    ncclProfiler_v5.finalize(profiler);
    _exit(is_nothing ? 0 : 1);
  }
  int status = 1;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
  call(profiler, 1);
  ncclProfiler_v5.finalize(profiler);
  CHECK(entries(2, 2).size() == 1);
}

/// What the adaptive tuner is told and hooks into.
void what_the_tuner_uses() {
  setenv("DYNAMICCL_SAMPLE_PERCENT", "1", 1);
  CreatedCommunicator told;
  Profiler* profiler = create(77, 5);
  std::thread([] {
    CreatedCommunicator other;
    CHECK(!take_created(77, &other));  // another thread's
  }).join();
  CHECK(take_created(77, &told) && told.profiler == profiler && told.rank == 5);
  CHECK(told.num_ranks == 8 && told.num_nodes == 2 && !take_created(77, &told));  // once
  static CallRecord last;
  Recorder::set_sink(
      [](void* to, const CallRecord& record) { *static_cast<CallRecord*>(to) = record; }, &last);
  const auto complete = [](void* user, CallRecord* record) {
    record->table = *static_cast<std::uint32_t*>(user);
  };
  std::uint32_t table = 9;
  CHECK(profiler->set_describe(complete, &table));
  call(profiler, 0);
  CHECK(last.comm_id == 77 && last.table == 9);
  call(profiler, 1, true);  // which table it was chosen by is not known
  CHECK(last.flags == kFlagCaptured && last.table == 0);
  profiler->take_times(true);
  void* coll = call(profiler, 2);
  run_kernel(profiler, coll, 0, 100);
  run_kernel(profiler, coll, 1, 101);
  CHECK(last.sequence == 2 && last.start_ns == 100 && last.stop_ns == 201);
  for (std::uint64_t i = 1597; i < 1620; ++i) CHECK(call(profiler, i) != nullptr);
  profiler->take_times(false);  // the burst in between has not ended it
  CHECK(call(profiler, 3) == nullptr);

  // It takes its hook back while another thread is in the middle of calls.
  std::atomic<bool> stop{false};
  std::thread caller([&] {
    for (std::uint64_t i = 0; !stop.load(); ++i) call(profiler, i);
  });
  for (int i = 0; i < 200; ++i) {
    auto* hooked = new std::uint32_t(7);
    CHECK(profiler->set_describe(complete, hooked));
    if (i % 16 == 0) std::this_thread::yield();
    CHECK(profiler->set_describe(nullptr, nullptr));
    delete hooked;  // would be read by a call that is still inside
  }
  stop.store(true);
  caller.join();
  ncclProfiler_v5.finalize(profiler);
}

}  // namespace

int main(int, char** arguments) {
  g_folder = std::filesystem::path(arguments[2]) / "calls-recorder";
  std::filesystem::remove_all(g_folder);
  setenv("DYNAMICCL_CALLS_DIR", g_folder.c_str(), 1);
  setenv("DYNAMICCL_SAMPLE_PERCENT", "100", 1);
  many_threads();
  too_many_for_the_writer();
  wrong_handles();
  forked_child();
  what_the_tuner_uses();
  return g_failures;
}
