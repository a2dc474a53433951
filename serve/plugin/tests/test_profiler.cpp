// The profiler as NCCL sees it: events in the order of each version, records in files.
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <thread>

#include "profiler/created.h"
#include "profiler/profiler.h"
#include "profiler/recorder.h"
#include "tests/calls_files.h"
#include "tests/check.h"
#include "tests/profiler_driver.h"

using namespace dynamiccl;

namespace {

void records_say_what_ran(const char* path, int version, CallsDirectory* calls) {
  ProfilerDriver nccl(path, version);
  ProfilerDriver::Comm comm = nccl.init(0xabc, 3, 8, 2);
  CHECK(nccl.call(&comm).collective == nullptr);  // not sampled: nothing more to hear
  nccl.call(&comm, {"AllGather", 4096, "ncclInt8", 4, "PAT", "SIMPLE", false});
  nccl.call(&comm, {"ReduceScatter", 100, "ncclBfloat16", 1, "NVLS", "LL", false});
  nccl.call(&comm, {"Broadcast", 64, "ncclInt8", 1, "COLLNET_CHAIN", "LL", false});
  nccl.call(&comm, {"Reduce", 3, "Unknown", 1, "NVLS_TREE", "new", false});
  nccl.call(&comm, {"AllReduce", 5, "ncclFloat64", 1, "COLLNET_DIRECT", "LL128", false});
  nccl.call(&comm, {"AlltoAll", 5, "ncclFloat64", 1, "RING", "LL128", false});
  nccl.finalize(&comm);
  const std::vector<CallRecord> records = calls->take();
  CHECK(records.size() == 6);  // no tuner is asked about the seventh
  const CallRecord& broadcast = records[0];
  const CallRecord& reduce = records[1];
  const CallRecord& gather = records[2];
  const CallRecord& scatter = records[3];
  const CallRecord& first = records[4];
  CHECK(first.comm_id == 0xabc && first.sequence == 0 && first.collective == kAllReduce);
  CHECK(first.size_bytes == 4 << 20 && first.datatype == 7);
  CHECK(first.rank == 3 && first.num_ranks == 8 && first.num_nodes == 2);
  CHECK(first.algorithm == kRing && first.protocol == kLL128);
  CHECK(first.num_channels == 2 && first.num_warps == 16);
  CHECK(first.enqueued_ns > 1'600'000'000'000'000'000U);
  CHECK(first.start_ns == 0 && first.stop_ns == 0 && first.flags == 0);
  CHECK(first.table == 0 && first.decided == 0);
  CHECK(records[5].sequence == 1 && records[5].size_bytes == 40);
  CHECK(records[5].algorithm == kCollNetDirect);
  CHECK(gather.size_bytes == 4096 * 8 && gather.algorithm == kPAT && gather.protocol == kSimple);
  CHECK(scatter.size_bytes == 1600 && scatter.algorithm == kNVLS && scatter.protocol == kLL);
  CHECK(broadcast.size_bytes == 64 && broadcast.algorithm == kCollNetChain);
  CHECK(reduce.size_bytes == 3 && reduce.algorithm == kNVLSTree && reduce.protocol == kUnknown);
}

/// Kernels end on another thread, late; one lacks a channel, one comes after the end of everything.
void gpu_times(const char* path, int version, CallsDirectory* calls) {
  setenv("DYNAMICCL_SAMPLE_PERCENT", "100", 1);
  ProfilerDriver nccl(path, version);
  ProfilerDriver::Comm comm = nccl.init(1);
  std::vector<Launched> launched;
  for (int i = 0; i < 20; ++i) launched.push_back(nccl.call(&comm));
  void* late = nccl.start_kernel(launched[7], 1, 100);
  std::thread proxy([&] {
    for (std::size_t i = 0; i < 20; ++i) {
      if (i == 5) continue;
      if (i == 6 || i == 7) {
        nccl.run_kernel(launched[i], 0, 100, 200);
      } else {
        nccl.run_kernels(launched[i], 1000 * i + 1, 1000 * i + 500);
      }
    }
  });
  proxy.join();
  nccl.finalize(&comm);
  nccl.stamp_kernel(late, 999);
  nccl.stop(late);
  nccl.run_kernels(launched[5], 1, 2);
  const std::vector<CallRecord> records = calls->take();
  CHECK(records.size() == 20);
  for (std::uint64_t i = 0; i < 20; ++i) {
    const bool is_whole = i < 5 || i > 7;
    CHECK(records[i].sequence == i);
    CHECK(records[i].start_ns == (is_whole ? 1000 * i + 1 : 0));
    CHECK(records[i].stop_ns == (is_whole ? 1000 * i + 501 : 0));
    CHECK(records[i].flags == (is_whole ? 0 : kFlagIncomplete));
  }
  // The memory serves the next communicator; what is late for the last one does not reach it.
  ProfilerDriver::Comm next = nccl.init(2);
  const Launched fresh = nccl.call(&next);
  nccl.run_kernels(launched[5], 1, 2);
  nccl.stop(launched[5].collective);
  nccl.run_kernels(fresh, 50, 60);
  nccl.finalize(&next);
  const std::vector<CallRecord> after = calls->take();
  CHECK(after.size() == 1 && after[0].comm_id == 2 && after[0].start_ns == 50);
  unsetenv("DYNAMICCL_SAMPLE_PERCENT");
}

void captured(const char* path, int version, CallsDirectory* calls) {
  ProfilerDriver nccl(path, version);
  ProfilerDriver::Comm comm = nccl.init(1);
  ProfiledCall call;
  call.captured = true;
  nccl.call(&comm);
  for (int replay = 0; replay < 3; ++replay) nccl.call(&comm, call);
  nccl.finalize(&comm);
  const std::vector<CallRecord> records = calls->take();
  CHECK(records.size() == 4 && records[0].flags == 0 && records[3].sequence == 1);
  // 2.27 does not say so; there a number that stands still does.
  CHECK(records[1].flags == (version == 4 ? 0 : kFlagCaptured));
  CHECK(records[2].flags == kFlagCaptured && records[3].flags == kFlagCaptured);
}

void disabled(const char* path, int version, CallsDirectory* calls) {
  const auto mask_of = [&] {
    ProfilerDriver nccl(path, version);
    ProfilerDriver::Comm comm = nccl.init(1);
    CHECK((comm.context == nullptr) == (nccl.mask() == 0));
    nccl.call(&comm);
    nccl.finalize(&comm);
    return nccl.mask();
  };
  const int wanted = ncclProfileColl | (version == 4 ? 0 : ncclProfileKernelLaunch);
  CHECK(mask_of() == wanted && calls->take().size() == 1);
  setenv("DYNAMICCL_DISABLE", "1", 1);
  CHECK(mask_of() == 0);
  unsetenv("DYNAMICCL_DISABLE");
  const std::string directory = calls->path();
  unsetenv("DYNAMICCL_CALLS_DIR");
  CHECK(mask_of() == wanted);  // not for records, but to hear of captures
  setenv("DYNAMICCL_CALLS_DIR", directory.c_str(), 1);
  CHECK(calls->take().empty());
}

void several_communicators(const char* path, int version, CallsDirectory* calls) {
  constexpr int kThreads = 4;
  constexpr std::uint64_t kCalls = 2000;
  ProfilerDriver nccl(path, version);
  // With the last communicator the recorder ends, and waits for no slow disk.
  ProfilerDriver::Comm open = nccl.init(2 * kThreads);
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      for (std::uint64_t round = 0; round < 2; ++round) {
        ProfilerDriver::Comm comm =
            nccl.init(2 * static_cast<std::uint64_t>(thread) + round, thread);
        for (std::uint64_t i = 0; i < kCalls; ++i) {
          nccl.run_kernels(nccl.call(&comm), 100, 200);
          if (i % 64 == 0) std::this_thread::yield();
        }
        nccl.finalize(&comm);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  constexpr std::uint64_t kAll = 2 * kThreads * kCalls;
  for (int tries = 0; tries < 6000 && calls->entries().size() < kAll; ++tries) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  nccl.finalize(&open);
  for (const CallsEntry& entry : calls->entries()) CHECK(entry.dropped == 0);
  const std::vector<CallRecord> records = calls->take();
  CHECK(records.size() == kAll);  // the ring holds more
  std::uint64_t sampled = 0;
  for (std::size_t i = 0; i < records.size(); ++i) {
    CHECK(records[i].rank == static_cast<int>(records[i].comm_id / 2));
    CHECK(i == 0 || records[i].comm_id != records[i - 1].comm_id ||
          records[i].sequence > records[i - 1].sequence);
    CHECK(records[i].start_ns == 0 || records[i].stop_ns - records[i].start_ns == 101);
    sampled += records[i].start_ns != 0;
  }
  CHECK(sampled > 0 && sampled < 2 * kThreads * kCalls / 100 + 200);
  CHECK(!nccl.is_wide());
}

void unusable_directory(const char* path, CallsDirectory* calls) {
  chmod(calls->path().c_str(), 0777);
  ProfilerDriver nccl(path, 5);
  t_lines.clear();
  ProfilerDriver::Comm comm = nccl.init(1);
  nccl.call(&comm);
  nccl.finalize(&comm);
  CHECK(t_lines.size() == 1);
  CHECK(t_lines[0].find("cannot keep calls in") != std::string::npos);
  CHECK(t_lines[0].find("others may write to it") != std::string::npos);
  chmod(calls->path().c_str(), 0700);
  CHECK(calls->take().empty());
}

/// Handles and pointers that no version gives us.
void nonsense(const char* path, CallsDirectory* calls) {
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  const auto* v5 = static_cast<const ncclProfiler_v5_t*>(dlsym(library, "ncclProfiler_v5"));
  CHECK(v5->init(nullptr, 1, nullptr, nullptr, 1, 8, 0, nullptr) == ncclSuccess);
  void* context = nullptr;
  CHECK(v5->init(&context, 1, nullptr, nullptr, 1, 8, 0, nullptr) == ncclSuccess);
  CHECK(context == nullptr);
  int mask = 0;
  CHECK(v5->init(&context, 1, &mask, nullptr, 1, 8, 0, nullptr) == ncclSuccess);
  void* handle = &mask;
  CHECK(v5->startEvent(context, &handle, nullptr) == ncclSuccess && handle == nullptr);
  CHECK(v5->startEvent(context, nullptr, nullptr) == ncclSuccess);
  ncclProfilerEventDescr_v5_t event = {};
  event.type = ncclProfileColl;
  CHECK(v5->startEvent(nullptr, &handle, &event) == ncclSuccess && handle == nullptr);
  CHECK(v5->startEvent(context, &handle, &event) == ncclSuccess && handle == nullptr);
  event.type = std::uint64_t{1} << 40;
  CHECK(v5->startEvent(context, &handle, &event) == ncclSuccess && handle == nullptr);
  std::uint64_t bits = 1;
  for (int i = 0; i < 20'000; ++i) {
    bits = bits * 6364136223846793005U + 1442695040888963407U;
    void* const wrong = reinterpret_cast<void*>(i % 2 == 0 ? bits : bits >> 40);
    ncclProfilerEventStateArgs_v5_t arguments = {};
    event.type = ncclProfileKernelCh;
    event.parentObj = wrong;
    event.kernelCh = {static_cast<std::uint8_t>(i), bits};
    CHECK(v5->startEvent(context, &handle, &event) == ncclSuccess);
    CHECK(v5->recordEventState(handle, ncclProfilerKernelChStop, &arguments) == ncclSuccess);
    CHECK(v5->recordEventState(wrong, 22, &arguments) == ncclSuccess);
    CHECK(v5->recordEventState(wrong, 22, nullptr) == ncclSuccess);
    CHECK(v5->stopEvent(wrong) == ncclSuccess && v5->stopEvent(handle) == ncclSuccess);
  }
  CHECK(v5->stopEvent(nullptr) == ncclSuccess && v5->finalize(nullptr) == ncclSuccess);
  CHECK(v5->finalize(context) == ncclSuccess);
  CHECK(calls->take().empty());
  dlclose(library);
}

void forked_child(const char* path, CallsDirectory* calls) {
  ProfilerDriver nccl(path, 5);
  ProfilerDriver::Comm comm = nccl.init(1);
  const pid_t child = fork();
  if (child == 0) {
    ProfilerDriver::Comm own = nccl.init(2);
    const bool is_nothing = own.context == nullptr;
    nccl.call(&comm);
    nccl.finalize(&comm);  // must neither wait for a thread nor write
    _exit(is_nothing ? 0 : 1);
  }
  int status = 1;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
  nccl.call(&comm);
  nccl.finalize(&comm);
  CHECK(calls->take().size() == 1);
}

void complete(void* user, CallRecord* record) {
  record->table = *static_cast<std::uint32_t*>(user);
  record->decided = 1;
  record->flags |= kFlagProbe;
}

/// What the adaptive tuner uses, in this program's own copy of the profiler.
void what_the_tuner_uses(CallsDirectory* calls) {
  int mask = 0;
  CreatedCommunicator told;
  CHECK(!take_created(77, &told));
  Profiler* profiler = Profiler::create({77, 5, 8, 2, &mask, nullptr, true});
  std::thread([] {
    CreatedCommunicator other;
    CHECK(!take_created(77, &other));  // another thread's
  }).join();
  CHECK(take_created(77, &told) && !take_created(77, &told));  // once
  CHECK(told.profiler == profiler && told.rank == 5 && told.num_ranks == 8 && told.num_nodes == 2);
  std::uint32_t table = 9;
  CHECK(profiler->set_describe(complete, &table));
  const ncclProfilerColl_v4_t event = {0, "AllReduce", nullptr, nullptr, 1, 0, "ncclFloat32",
                                       1, 1,           "RING",  "LL"};
  profiler->start_collective(event, nullptr);
  CHECK(profiler->set_describe(nullptr, nullptr));
  profiler->start_collective(event, nullptr);
  profiler->finalize();
  const std::vector<CallRecord> records = calls->take();
  CHECK(records.size() == 2 && records[0].table == 9 && records[0].decided == 1);
  CHECK(records[0].flags == kFlagProbe && records[1].table == 0 && records[1].flags == 0);

  profiler = Profiler::create({77, 5, 8, 2, &mask, nullptr, true});
  CHECK(profiler->set_describe(complete, &table));
  CallMarks* marks = profiler->marks();
  CHECK(marks->pass() == CallMarks::kBegins && marks->pass() == 0);  // two calls of one group
  void* group = Profiler::start_group();
  void* of_captured = profiler->start_call(false, true, group);
  CHECK(marks->pass() == CallMarks::kCaptured);
  profiler->launch(Profiler::start_group());  // of sends and receives
  CHECK(marks->pass() == CallMarks::kCaptured);
  profiler->launch(group);
  CHECK(marks->pass() == (CallMarks::kBegins | CallMarks::kCaptured));
  profiler->start_call(false, false, Profiler::start_group());
  CHECK(marks->pass() == 0 && marks->captured == 1);
  profiler->start_collective(event, of_captured);
  profiler->finalize();
  const std::vector<CallRecord> captured = calls->take();
  // Which table it was chosen by is not known: nothing completes it.
  CHECK(captured.size() == 1 && captured[0].flags == kFlagCaptured && captured[0].table == 0);

  CHECK(!take_created(99, &told));  // another communicator's tuner never came
  setenv("DYNAMICCL_DISABLE", "1", 1);
  CHECK(Profiler::create({78, 1, 4, 1, &mask, nullptr, true}) == nullptr);
  CHECK(take_created(78, &told) && told.profiler == nullptr);
  unsetenv("DYNAMICCL_DISABLE");
}

/// A group may begin with a call of a communicator that we have no profiler of, and NCCL tells only
/// that one; its handle must still tell groups apart.
void group_of_a_stranger(const char* path) {
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  const auto* v5 = static_cast<const ncclProfiler_v5_t*>(dlsym(library, "ncclProfiler_v5"));
  ncclProfilerEventDescr_v5_t group = {};
  group.type = ncclProfileGroupApi;
  void *first = nullptr, *second = nullptr;
  CHECK(v5->startEvent(nullptr, &first, &group) == ncclSuccess);
  CHECK(v5->startEvent(nullptr, &second, &group) == ncclSuccess);
  CHECK(first != nullptr && second != nullptr && first != second);
  CHECK(v5->stopEvent(first) == ncclSuccess);
  group.type = ncclProfileCollApi;
  CHECK(v5->startEvent(nullptr, &first, &group) == ncclSuccess && first == nullptr);
  dlclose(library);
}

/// The tuner takes its hook back while another thread is in the middle of calls.
void description_taken_back() {
  int mask = 0;
  Profiler* profiler = Profiler::create({1, 0, 8, 1, &mask, nullptr, true});
  const ncclProfilerColl_v4_t event = {0, "AllReduce", nullptr, nullptr, 1, 0, "ncclFloat32",
                                       1, 1,           "RING",  "LL"};
  std::atomic<bool> stop{false};
  std::thread caller([&] {
    while (!stop.load()) profiler->start_collective(event, nullptr);
  });
  for (int i = 0; i < 200; ++i) {
    auto* table = new std::uint32_t(7);
    CHECK(profiler->set_describe(complete, table));
    if (i % 16 == 0) std::this_thread::yield();
    CHECK(profiler->set_describe(nullptr, nullptr));
    delete table;  // would be read by a call that is still inside
  }
  stop.store(true);
  caller.join();
  profiler->finalize();
}

}  // namespace

int main(int, char** arguments) {
  CallsDirectory calls(arguments[2], "profiler");
  for (const int version : {4, 5, 6}) {
    records_say_what_ran(arguments[1], version, &calls);
    gpu_times(arguments[1], version, &calls);
    captured(arguments[1], version, &calls);
  }
  disabled(arguments[1], 5, &calls);
  several_communicators(arguments[1], 5, &calls);
  unusable_directory(arguments[1], &calls);
  nonsense(arguments[1], &calls);
  forked_child(arguments[1], &calls);
  what_the_tuner_uses(&calls);
  group_of_a_stranger(arguments[1]);
  description_taken_back();
  return g_failures;
}
