// The process's recorder: it runs while somebody wants records, and leaves nothing behind.
#include <sys/resource.h>

#include <thread>

#include "profiler/recorder.h"
#include "tests/calls_files.h"
#include "tests/check.h"

using namespace dynamiccl;

namespace {

CallRecord record_of(std::uint64_t sequence) {
  CallRecord record = {};
  record.sequence = sequence;
  return record;
}

bool has_thread() {
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    if (CallsDirectory::content(task.path() / "comm") == "dynamiccl-calls\n") return true;
  }
  return false;
}

std::atomic<int> g_taken{0};

void count(void* user, const CallRecord&) { ++*static_cast<std::atomic<int>*>(user); }

void thread_only_when_wanted(CallsDirectory* calls) {
  unsetenv("DYNAMICCL_CALLS_DIR");
  CHECK(Recorder::acquire() == nullptr && !Recorder::is_on());
  Recorder::push(record_of(1));
  CHECK(!has_thread());
  Recorder::set_sink(count, &g_taken);
  CHECK(Recorder::is_on() && has_thread());
  Recorder::release();
  CHECK(!Recorder::is_on() && !has_thread());
  setenv("DYNAMICCL_CALLS_DIR", calls->path().c_str(), 1);
}

void files_and_sink_get_the_same(CallsDirectory* calls) {
  setenv("RANK", "12", 1);
  setenv("WORLD_SIZE", "16", 1);
  setenv("SLURM_JOB_ID", "88", 1);
  Recorder::set_facts("1.2.3", "gpu=none*0", 22907);
  Recorder::set_sampling(10'000, "observe");
  const RecorderCounters before = Recorder::counters();
  g_taken = 0;
  CHECK(Recorder::acquire() == nullptr && Recorder::acquire() == nullptr);
  for (std::uint64_t i = 0; i < 1000; ++i) Recorder::push(record_of(i));
  Recorder::release();
  CHECK(Recorder::is_on());  // another communicator is there
  Recorder::push(record_of(1000));
  Recorder::release();
  const RecorderCounters after = Recorder::counters();
  CHECK(g_taken == 1001 && after.taken - before.taken == 1001);
  CHECK(after.written - before.written == 1001 && after.lost == before.lost);
  const auto files = calls->files();
  CHECK(files.size() == 1 && files[0].string().find("-r12-") != std::string::npos);
  const std::string header = CallsDirectory::content(files[0]);
  for (const char* told : {"observe", "88", "1.2.3", "gpu=none*0"}) {
    CHECK(header.find(told) < kCallsHeaderBytes);
  }
  CHECK(calls->take().size() == 1001);
  // A later communicator gets a file of its own.
  Recorder::acquire();
  Recorder::push(record_of(7));
  Recorder::release();
  CHECK(calls->files().size() == 1 && calls->take().size() == 1);
  Recorder::release();  // one too many
  for (const char* variable : {"RANK", "WORLD_SIZE", "SLURM_JOB_ID"}) unsetenv(variable);
}

/// On a full disk the recorder goes on without files, and the signal of the limit reaches nobody.
void full_disk(CallsDirectory* calls) {
  rlimit before, limit;
  getrlimit(RLIMIT_FSIZE, &before);
  limit = before;
  limit.rlim_cur = 4096;
  const RecorderCounters start = Recorder::counters();
  g_taken = 0;
  Recorder::acquire();
  setrlimit(RLIMIT_FSIZE, &limit);
  for (std::uint64_t i = 0; i < 500; ++i) Recorder::push(record_of(i));
  while (g_taken < 500) std::this_thread::yield();
  Recorder::release();
  setrlimit(RLIMIT_FSIZE, &before);
  const RecorderCounters end = Recorder::counters();
  CHECK(end.lost - start.lost > 400);
  CHECK(end.written - start.written + end.lost - start.lost == 500);
  CHECK(calls->take().size() == end.written - start.written);
}

void comings_and_goings(CallsDirectory* calls) {
  g_taken = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([] {
      for (std::uint64_t round = 0; round < 20; ++round) {
        Recorder::acquire();
        Recorder::push(record_of(round));
        Recorder::release();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  Recorder::acquire();  // what came while one thread ended and the next began
  Recorder::release();
  CHECK(g_taken == 80);
  CHECK(calls->files().size() == 1);  // the same one, each time
  CHECK(calls->take().size() == 80);
  CHECK(!Recorder::is_on());
}

void odd_limits(CallsDirectory* calls) {
  for (const char* mib : {"0", "-3", "many", "99999999999999999999", "1"}) {
    setenv("DYNAMICCL_CALLS_MAX_MIB", mib, 1);
    CHECK(Recorder::acquire() == nullptr);
    Recorder::push(record_of(1));
    Recorder::release();
    CHECK(calls->take().size() == 1);
  }
  unsetenv("DYNAMICCL_CALLS_MAX_MIB");
}

}  // namespace

int main(int, char** arguments) {
  CallsDirectory calls(arguments[2], "recorder");
  thread_only_when_wanted(&calls);
  files_and_sink_get_the_same(&calls);
  full_disk(&calls);
  comings_and_goings(&calls);
  odd_limits(&calls);
  Recorder::set_sink(nullptr, nullptr);
  return g_failures;
}
