// The recorder under threads, late and wrong handles, a fork, and a tuner that hooks into it. Links
// the plugin's own objects; what it records of NCCL's events is in tests/collect/calls.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "profiler/created.h"
#include "profiler/profiler.h"
#include "tests/check.h"

using namespace dynamiccl;

namespace {

int g_mask = 0;        // NCCL's
int g_other_mask = 0;  // another NCCL's

Profiler* create(std::uint64_t comm_id, int rank = 0, int* mask = &g_mask) {
  return Profiler::create({comm_id, rank, 8, 2, mask, nullptr, true});
}

ncclProfilerColl_v4_t event_of(std::uint64_t sequence) {
  return {sequence, "AllReduce", nullptr, nullptr, 1, 0, "ncclFloat32", 2, 1, "RING", "LL"};
}

/// A call as NCCL 2.28 tells of it; null unless its channels will be reported.
void* call(Profiler* profiler, std::uint64_t sequence) {
  void* api = profiler->start_call({}, Profiler::start_group());
  void* coll = profiler->start_collective(event_of(sequence), api);
  Profiler::stop(coll);
  return coll;
}

void run_kernel(void* coll, int channel, std::uint64_t begin_ns) {
  void* kernel = Profiler::start_kernel(coll, channel, begin_ns);
  Profiler::stop_kernel(kernel, begin_ns + 100);
  Profiler::stop(kernel);
}

/// The records of the process's files, by communicator.
std::map<std::uint64_t, std::vector<CallRecord>> records_in(const std::filesystem::path& folder) {
  std::map<std::uint64_t, std::vector<CallRecord>> found;
  for (const auto& file : std::filesystem::directory_iterator(folder)) {  // there is one
    std::ifstream stream(file.path(), std::ios::binary);
    const std::string bytes = {std::istreambuf_iterator<char>(stream), {}};
    for (std::size_t at = 512; at + 80 <= bytes.size(); at += 80) {
      CallRecord record;
      std::memcpy(&record, bytes.data() + at, sizeof record);
      found[record.comm_id].push_back(record);
    }
  }
  return found;
}

/// Ranks that share a process call, and a proxy thread reports; communicators come and go.
void many_threads(const std::filesystem::path& folder) {
  constexpr int kThreads = 4, kRounds = 5;
  constexpr std::uint64_t kCalls = 400;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([thread] {
      for (int round = 0; round < kRounds; ++round) {
        Profiler* profiler = create(static_cast<std::uint64_t>(100 + 10 * thread + round), thread);
        for (std::uint64_t i = 0; i < kCalls; i += 8) {
          void* colls[8];
          for (std::uint64_t j = 0; j < 8; ++j) colls[j] = call(profiler, i + j);
          std::thread proxy([&] {
            for (std::uint64_t j = 0; j < 8; ++j) run_kernel(colls[j], 1, 1000 * (i + j + 1));
          });
          for (std::uint64_t j = 0; j < 8; ++j) run_kernel(colls[j], 0, 1000 * (i + j + 1) + 1);
          proxy.join();
        }
        profiler->finalize();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const auto found = records_in(folder);
  for (int thread = 0; thread < kThreads; ++thread) {
    for (int round = 0; round < kRounds; ++round) {
      const auto of = found.find(static_cast<std::uint64_t>(100 + 10 * thread + round));
      if (of == found.end() || of->second.size() != kCalls) {
        CHECK(false);
        continue;
      }
      std::vector<int> seen(kCalls);
      std::uint64_t timed = 0;
      for (const CallRecord& record : of->second) {
        ++seen[record.sequence];
        CHECK(record.rank == thread && record.flags == 0);
        if (record.start_ns == 0) continue;  // another one's end narrowed the mask
        ++timed;
        CHECK(record.start_ns == 1000 * (record.sequence + 1));
        CHECK(record.stop_ns == record.start_ns + 101);
      }
      CHECK(seen == std::vector<int>(kCalls, 1) && timed > kCalls / 2);
    }
  }
}

/// Nobody waits for the writer: what does not fit is counted, the rest is whole and in order.
void too_many_for_the_ring(const std::filesystem::path& folder) {
  constexpr std::uint64_t kProducers = 3, kEach = 100'000;
  Recorder::acquire(0, nullptr);
  const RecorderCounters before = Recorder::counters();
  std::vector<std::thread> producers;
  for (std::uint64_t producer = 0; producer < kProducers; ++producer) {
    producers.emplace_back([producer] {
      for (std::uint64_t i = 0; i < kEach; ++i) {
        CallRecord record = {};
        record.comm_id = 1000 + producer;
        record.sequence = i;
        record.stop_ns = ~i;
        Recorder::push(record);
      }
    });
  }
  for (std::thread& thread : producers) thread.join();
  Recorder::release();
  const RecorderCounters after = Recorder::counters();
  CHECK(after.taken - before.taken == kProducers * kEach && after.lost == before.lost);
  CHECK(after.dropped > before.dropped);
  CHECK(after.written - before.written + after.dropped - before.dropped == kProducers * kEach);
  std::uint64_t kept = 0;
  for (const auto& [comm_id, records] : records_in(folder)) {
    if (comm_id < 1000) continue;
    kept += records.size();
    for (std::size_t i = 0; i < records.size(); ++i) {
      CHECK(records[i].stop_ns == ~records[i].sequence);
      CHECK(i == 0 || records[i].sequence > records[i - 1].sequence);
    }
  }
  CHECK(kept == after.written - before.written);
}

/// Handles that we never gave out, and those of calls long gone.
void wrong_handles() {
  const RecorderCounters before = Recorder::counters();
  std::uint64_t bits = 1;
  for (int i = 0; i < 20'000; ++i) {
    bits = bits * 6364136223846793005U + 1442695040888963407U;
    void* const wrong = reinterpret_cast<void*>(i % 2 == 0 ? bits : bits >> 40);
    run_kernel(wrong, i % 256, bits);
    Profiler::stop_kernel(wrong, bits);
    Profiler::stop(wrong);
  }
  Profiler::stop(nullptr);
  CHECK(Recorder::counters().taken == before.taken);
  Profiler* profiler = create(1);
  CHECK(Profiler::start_kernel(call(profiler, 0), 64, 1) == nullptr);
  profiler->finalize();
}

/// A child has none of the threads: it must neither wait for one nor record anything.
void forked_child() {
  Profiler* profiler = create(2);
  const std::uint64_t written = Recorder::counters().written;
  const pid_t child = fork();
  if (child == 0) {
    const bool is_nothing = create(3) == nullptr;
    call(profiler, 0);
    profiler->finalize();
    _exit(is_nothing ? 0 : 1);
  }
  int status = 1;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
  run_kernel(call(profiler, 0), 0, 1);
  profiler->finalize();
  CHECK(Recorder::counters().written > written);
}

std::atomic<int> g_sunk{0};

void complete(void* user, CallRecord* record) {
  record->table = *static_cast<std::uint32_t*>(user);
  record->decided = 1;
}

void keep(void* user, const CallRecord& record) {
  if (record.comm_id == 77) *static_cast<CallRecord*>(user) = record;
  ++g_sunk;
}

/// What the adaptive tuner is told and hooks into.
void what_the_tuner_uses() {
  setenv("DYNAMICCL_SAMPLE_PERCENT", "1", 1);
  CreatedCommunicator told;
  CHECK(!take_created(77, &told));
  Profiler* profiler = create(77, 5, &g_other_mask);
  std::thread([] {
    CreatedCommunicator other;
    CHECK(!take_created(77, &other));  // another thread's
  }).join();
  CHECK(take_created(77, &told) && !take_created(77, &told));  // once
  CHECK(told.profiler == profiler && told.rank == 5 && told.num_ranks == 8 && told.num_nodes == 2);
  std::uint32_t table = 9;
  CallRecord last = {};
  CHECK(profiler->set_describe(complete, &table));
  Recorder::set_sink(keep, &last);
  call(profiler, 0);
  CHECK(last.comm_id == 77 && last.table == 9 && last.decided == 1);
  CHECK(profiler->set_describe(nullptr, nullptr));
  call(profiler, 1);
  CHECK(last.sequence == 1 && last.table == 0);
  profiler->take_times(true);
  void* coll = call(profiler, 2);
  CHECK(coll != nullptr);
  run_kernel(coll, 0, 100);
  run_kernel(coll, 1, 101);
  CHECK(last.sequence == 2 && last.start_ns == 100 && last.stop_ns == 201);
  for (std::uint64_t i = 1597; i < 1620; ++i) CHECK(call(profiler, i) != nullptr);
  profiler->take_times(false);  // the burst in between has not ended it
  CHECK(call(profiler, 3) == nullptr);
  Recorder::set_sink(nullptr, nullptr);
  const int sunk = g_sunk.load();
  call(profiler, 4);
  CHECK(g_sunk.load() == sunk && last.sequence == 3);

  CallMarks* marks = profiler->marks();
  ncclProfilerCollApi_v5_t captured = {};
  captured.graphCaptured = true;
  CHECK(marks->pass() == CallMarks::kBegins && marks->pass() == 0);  // two calls of one group
  void* group = Profiler::start_group();
  void* of_captured = profiler->start_call(captured, group);
  CHECK(marks->pass() == CallMarks::kCaptured);
  profiler->launch(Profiler::start_group());  // of sends and receives
  CHECK(marks->pass() == CallMarks::kCaptured);
  profiler->launch(group);
  CHECK(marks->pass() == (CallMarks::kBegins | CallMarks::kCaptured));
  profiler->start_call({}, Profiler::start_group());
  CHECK(marks->pass() == 0);
  Recorder::set_sink(keep, &last);
  CHECK(profiler->set_describe(complete, &table));
  profiler->start_collective(event_of(5), of_captured);
  // Which table it was chosen by is not known: nothing completes it.
  CHECK(last.sequence == 5 && last.flags == kFlagCaptured && last.table == 0);
  profiler->finalize();
  Recorder::set_sink(nullptr, nullptr);

  CHECK(!take_created(99, &told));  // another communicator's tuner never came
  setenv("DYNAMICCL_DISABLE", "1", 1);
  CHECK(create(78, 0, &g_other_mask) == nullptr && take_created(78, &told) &&
        told.profiler == nullptr);
  unsetenv("DYNAMICCL_DISABLE");
}

/// The tuner takes its hooks back while another thread is in the middle of calls.
void hooks_taken_back() {
  Profiler* profiler = create(4, 0, &g_other_mask);
  std::atomic<bool> stop{false};
  std::thread caller([&] {
    for (std::uint64_t i = 0; !stop.load(); ++i) call(profiler, i);
  });
  for (int i = 0; i < 200; ++i) {
    auto* table = new std::uint32_t(7);
    auto* last = new CallRecord;
    CHECK(profiler->set_describe(complete, table));
    Recorder::set_sink(keep, last);
    if (i % 16 == 0) std::this_thread::yield();
    CHECK(profiler->set_describe(nullptr, nullptr));
    Recorder::set_sink(nullptr, nullptr);
    delete table;  // would be read by a call that is still inside
    delete last;
  }
  stop.store(true);
  caller.join();
  profiler->finalize();
}

}  // namespace

int main(int, char** arguments) {
  const std::filesystem::path folder = std::filesystem::path(arguments[2]) / "calls-recorder";
  std::filesystem::remove_all(folder);
  setenv("DYNAMICCL_CALLS_DIR", folder.c_str(), 1);
  setenv("DYNAMICCL_SAMPLE_PERCENT", "100", 1);
  many_threads(folder);
  too_many_for_the_ring(folder);
  wrong_handles();
  forked_child();
  what_the_tuner_uses();
  hooks_taken_back();
  return g_failures;
}
