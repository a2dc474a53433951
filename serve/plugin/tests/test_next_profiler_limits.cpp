// What a vendor's profiler behind ours is kept from: events without end, after its end and from
// many threads; and which cannot be had at all.
#include <atomic>
#include <mutex>
#include <thread>

#include "tests/vendor_runs.h"

namespace {

/// More at a time than there are places for: theirs gets no start that would lack its stop.
void too_many(const std::string& vendor, int release) {
  apart(chained(vendor, ncclProfileColl | ncclProfileKernelCh), [&] {
    NcclEvents nccl(g_ours.c_str(), release);
    Comm comm = nccl.init(1);
    const VendorEvents* events = events_of(vendor);
    constexpr long kMany = 20'000;
    std::vector<void*> kernels;
    t_lines.clear();
    std::vector<Launch> launches = nccl.call(&comm, {{}});
    nccl.launch(&comm, &launches);
    for (long i = 0; i < kMany; ++i) kernels.push_back(nccl.start_kernel(comm, launches[0], 0));
    CHECK(events->of_type[6] == 1 << 14);
    CHECK(t_lines.size() == 1 && t_lines[0].find("some do not reach it") != std::string::npos);
    for (void* kernel : kernels) nccl.stop(kernel);
    for (void* kernel : kernels) nccl.stop(kernel);  // again: those turns are over
    CHECK(events->open == 0 && events->twice == 0);
    for (int i = 0; i < 100; ++i) run_call(&nccl, &comm);
    CHECK(events->of_type[6] == (1 << 14) + 200 && events->open == 0);
    // Started and never stopped: after long enough their places are used again.
    for (long i = 0; i < 200'000; ++i) nccl.start_kernel(comm, launches[0], 0);
    const long heard = events->of_type[6];
    for (long i = 0; i < 100'000; ++i) nccl.start_kernel(comm, launches[0], 0);
    CHECK(events->of_type[6] > heard);
    t_lines.clear();
    nccl.finalize(&comm);
    CHECK(t_lines.size() == 1 && t_lines[0].find("did not reach it: ") != std::string::npos);
    comm = nccl.init(2);  // the places of one that is gone are free
    const long gone = events->of_type[6];
    for (int i = 0; i < 100; ++i) run_call(&nccl, &comm);
    CHECK(events->of_type[6] == gone + 200);
    nccl.finalize(&comm);
  });
}

/// After finalize a vendor may have freed what its handles point to.
void late_events(const std::string& vendor, int release) {
  Settings settings = chained(vendor, kEverything);
  settings.emplace_back("DYNAMICCL_SAMPLE_PERCENT", "100");
  apart(settings, [&] {
    NcclEvents nccl(g_ours.c_str(), release);
    Comm comm = nccl.init(1);
    const VendorEvents* events = events_of(vendor);
    std::vector<Launch> launches = nccl.call(&comm, {{}});
    nccl.launch(&comm, &launches);
    void* late = nccl.start_kernel(comm, launches[0], 0);
    const Comm gone = comm;
    nccl.finalize(&comm);
    const auto play_late = [&] {
      const long starts = events->starts, records = events->records, open = events->open;
      nccl.stop(late);
      nccl.progress(gone, launches[0]);
      Comm again = gone;
      nccl.launch(&again, &launches);
      nccl.finalize(&again);
      CHECK(events->starts == starts && events->records == records && events->open == open);
    };
    play_late();
    comm = nccl.init(2);  // in the place of the last one
    play_late();
    CHECK(run_call(&nccl, &comm) && events->late == 0 && events->finalized == 1);
    nccl.finalize(&comm);
    CHECK(events->finalized == 2);
  });
}

/// Handles that nobody gave out.
void nonsense(const std::string& vendor, int release) {
  apart(chained(vendor, kEverything), [&] {
    NcclEvents nccl(g_ours.c_str(), release);
    Comm comm = nccl.init(1);
    for (int i = 0; i < 100; ++i) run_call(&nccl, &comm);
    const VendorEvents* events = events_of(vendor);
    const long records = events->records;
    std::uint64_t bits = 1;
    for (int i = 0; i < 20'000; ++i) {
      bits = bits * 6364136223846793005U + 1442695040888963407U;
      void* const wrong = reinterpret_cast<void*>(bits >> i % 40);
      Comm nobody;
      nobody.context = reinterpret_cast<void*>(bits << 2 | 1);
      Launch launch;
      launch.mask = kEverything;
      launch.task = wrong;
      nccl.stop(wrong);
      nccl.progress(nobody, launch);
      nccl.finalize(&nobody);
    }
    CHECK(events->records == records && events->open == 0 && events->twice == 0);
    CHECK(events->finalized == 0);
    nccl.finalize(&comm);
    CHECK(events->finalized == 1);
  });
}

/// Launched collectives on their way to the one thread that sees their kernels.
class Proxy {
 public:
  explicit Proxy(NcclEvents* nccl) : nccl_(nccl), thread_([this] { run(); }) {}
  ~Proxy() {
    is_over_.store(true);
    thread_.join();
  }
  Proxy(const Proxy&) = delete;
  Proxy& operator=(const Proxy&) = delete;

  void add(const Comm& comm, const Launch& launch) {
    const std::lock_guard<std::mutex> lock(mutex_);
    work_.emplace_back(comm, launch);
  }
  void wait() {
    while (true) {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (work_.empty() && !is_busy_) return;
    }
  }

 private:
  void run() {
    while (!is_over_.load()) {
      std::vector<std::pair<Comm, Launch>> work;
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        work.swap(work_);
        is_busy_ = !work.empty();
      }
      for (const auto& [comm, launch] : work) nccl_->progress(comm, launch);
      const std::lock_guard<std::mutex> lock(mutex_);
      is_busy_ = false;
    }
  }

  NcclEvents* nccl_;
  std::mutex mutex_;
  std::vector<std::pair<Comm, Launch>> work_;
  bool is_busy_ = false;
  std::atomic<bool> is_over_{false};
  std::thread thread_;
};

/// Communicators of several threads, whose kernels end on yet another one; some of it late.
void many_threads(const std::string& vendor, int release, bool waits) {
  Settings settings = chained(vendor, kEverything);
  settings.emplace_back("DYNAMICCL_SAMPLE_PERCENT", "50");
  apart(settings, [&] {
    NcclEvents nccl(g_ours.c_str(), release);
    const VendorEvents* events = events_of(vendor);
    {
      Proxy proxy(&nccl);
      std::vector<std::thread> threads;
      for (std::uint64_t thread = 0; thread < 4; ++thread) {
        threads.emplace_back([&, thread] {
          for (std::uint64_t round = 0; round < 5; ++round) {
            Comm comm = nccl.init(10 * thread + round, static_cast<int>(thread));
            for (int i = 0; i < 100; ++i) {
              std::vector<Launch> launches = nccl.call(&comm, {{}, {i % 4 == 0, false, 1}});
              nccl.launch(&comm, &launches);
              for (const Launch& launch : launches) proxy.add(comm, launch);
              if (i % 10 == static_cast<int>(thread)) {
                __atomic_store_n(events->mask.load(), i % 20 < 10 ? 66 : kEverything,
                                 __ATOMIC_SEQ_CST);
              }
              if (i % 10 == 0) nccl.control(comm);
            }
            if (waits) proxy.wait();
            nccl.finalize(&comm);
          }
        });
      }
      for (std::thread& thread : threads) thread.join();
      proxy.wait();
    }
    CHECK(events->inits == 20 && events->finalized == 20 && events->late == 0);
    CHECK(events->twice == 0 && events->starts > 2000);
    CHECK(!waits || events->open == 0);
  });
}

void refuses_to_start(const std::string& vendor, int release) {
  Settings settings = chained(vendor, kEverything);
  settings.emplace_back("VENDOR_INIT_ERROR", "1");
  apart(settings, [&] {
    NcclEvents nccl(g_ours.c_str(), release);
    t_lines.clear();
    Comm comm = nccl.init(1);
    CHECK(comm.context != nullptr && nccl.mask() == asked_by_ours(release));
    bool is_said = false;
    for (const std::string& line : t_lines) {
      is_said = is_said || line.find("its init returned an error") != std::string::npos;
    }
    CHECK(is_said);
    run_call(&nccl, &comm);
    nccl.finalize(&comm);
    const VendorEvents* events = events_of(vendor);
    CHECK(events->inits == 1 && events->starts == 0 && events->finalized == 0);
  });
  settings.emplace_back("DYNAMICCL_DISABLE", "1");
  apart(settings, [&] {
    NcclEvents nccl(g_ours.c_str(), release);
    CHECK(nccl.init(1).context == nullptr);
  });
}

/// One that cannot be chained to costs one line, and ours goes on as if it were not named.
void cannot_be_had() {
  const std::pair<std::string, const char*> cases[] = {
      {"/nowhere/libvendor.so", "goes on without it: /nowhere/libvendor.so"},
      {"nobody", "libnccl-profiler-nobody.so"},
      {g_ours, "that is this plugin itself"},
      {vendor_path("old"), "no profiler from v4 on"},
      {vendor_path("v6"), ""}};
  for (const auto& [name, said] : cases) {
    const bool is_new = said[0] == '\0';  // v6, which 2.27 cannot feed
    apart({{"DYNAMICCL_NEXT_PROFILER", name}}, [&, said = std::string(said)] {
      const int release = is_new ? 27 : 30;
      NcclEvents nccl(g_ours.c_str(), release);
      t_lines.clear();
      Comm comms[] = {nccl.init(1), nccl.init(2)};
      int lines = 0;
      for (const std::string& line : t_lines) {
        if (line.find("goes on without it") == std::string::npos) continue;
        CHECK(line.find(said) != std::string::npos);
        ++lines;
      }
      CHECK(lines == 1 && nccl.mask() == asked_by_ours(release));
      for (Comm& comm : comms) {
        run_call(&nccl, &comm);
        nccl.finalize(&comm);
      }
    });
  }
  apart({{"DYNAMICCL_NEXT_PROFILER", "none"}}, [] {
    NcclEvents nccl(g_ours.c_str(), 30);
    t_lines.clear();
    Comm comm = nccl.init(1);
    CHECK(t_lines.size() == 1);
    nccl.finalize(&comm);
  });
}

}  // namespace

int main(int, char** arguments) {
  g_ours = arguments[1];
  g_build = arguments[2];
  const CallsDirectory calls(g_build, "next-profiler-limits");  // so that ours has something to do
  for (const auto& [vendor, release] : kAll) {
    late_events(vendor, release);
    refuses_to_start(vendor, release);
  }
  nonsense("v4", 27);
  nonsense("v6", 30);
  too_many("v4", 27);
  too_many("v5", 30);
  for (const bool waits : {true, false}) {
    many_threads("v4", 27, waits);
    many_threads("v5", 28, waits);
    many_threads("v6", 30, waits);
  }
  cannot_be_had();
  return g_failures;
}
