// Sweep mode under threads, and when its report is written to its file's server. What it plays is
// in tests/serve/test_sweep.py.
#include <dlfcn.h>
#include <sys/mman.h>
#include <time.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "file.h"
#include "nccl/tuner_abi.h"
#include "tests/check.h"
#include "tests/table_file.h"

using namespace dynamiccl;

namespace {

std::atomic<int> g_syncs{0};
std::atomic<bool> g_holds{false};    // a sync goes on
std::atomic<bool> g_is_held{false};  // ... and one is inside
std::atomic<time_t> g_now_s{1000};

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

/// In place of the C library's: the sweep library calls them.
EXPORT int msync(void*, std::size_t, int flags) noexcept {
  CHECK(flags == MS_SYNC);
  ++g_syncs;
  while (g_holds.load()) {
    g_is_held.store(true);
    std::this_thread::yield();
  }
  return 0;
}
EXPORT int clock_gettime(clockid_t, timespec* time) noexcept {
  *time = {g_now_s.load(), 0};
  return 0;
}

namespace {

constexpr std::size_t kSizeBytes = 1024;

/// Eight ranks, one size, two halves, one config: Ring/LL128 with 8 channels.
class Sweep {
 public:
  Sweep(const char* library, std::string folder, int calls_per_half, int num_blocks)
      : tuner_(static_cast<const ncclTuner_v6_t*>(
            dlsym(dlopen(library, RTLD_NOW | RTLD_LOCAL), "ncclTunerPlugin_v6"))) {
    Bytes bytes(kScheduleMagic, kScheduleMagic + 8);
    for (const int value : {1, 1, 8, 4, 2, calls_per_half, 0, 1, num_blocks, 1}) {
      append(&bytes, static_cast<std::uint64_t>(value), 4);
    }
    append(&bytes, kSizeBytes, 8);
    for (const int value : {1, 1, 8, 1}) append(&bytes, static_cast<std::uint64_t>(value), 1);
    bytes.resize(bytes.size() + 4 + 2 * static_cast<std::size_t>(num_blocks));
    const std::uint64_t checksum = fnv1a(bytes.data(), bytes.size());
    append(&bytes, checksum, 8);
    std::filesystem::create_directories(folder);
    std::filesystem::remove(folder + "/report");
    std::ofstream(folder + "/schedule", std::ios::binary)
        .write(reinterpret_cast<const char*>(bytes.data()),
               static_cast<std::streamsize>(bytes.size()));
    char hash[17];
    std::snprintf(hash, sizeof hash, "%016llx", static_cast<unsigned long long>(checksum));
    setenv("DYNAMICCL_MODE", "sweep", 1);
    setenv("DYNAMICCL_SCHEDULE", (folder + "/schedule").c_str(), 1);
    setenv("DYNAMICCL_SCHEDULE_HASH", hash, 1);
    setenv("DYNAMICCL_SWEEP_REPORT", (folder + "/report").c_str(), 1);
    tuner_->init(&context_, 1, 8, 1, nullptr, nullptr, nullptr);
    CHECK(context_ != nullptr);
  }

  void finalize() const { tuner_->finalize(context_); }

  /// Whether it got the config; false: NCCL's own choice. Nothing else may come.
  bool call() const {
    float costs[21];
    for (float& cost : costs) cost = 10.0F;
    int channels = 0;
    tuner_->getCollInfo(context_, 4, kSizeBytes, 1, reinterpret_cast<float**>(costs), 7, 3, 0,
                        &channels);
    const bool is_played = costs[4] == 0.0F;
    CHECK(channels == (is_played ? 8 : 0));
    for (int i = 0; i < 21; ++i) CHECK(costs[i] == (i == 4 && is_played ? 0.0F : 10.0F));
    std::size_t chunk = 1 << 19;
    tuner_->getChunkSize(context_, 4, kSizeBytes, 1, 1, 8, &chunk);
    CHECK(chunk == 1 << 19);
    return is_played;
  }

 private:
  const ncclTuner_v6_t* tuner_;
  void* context_ = nullptr;
};

/// The first call of each half synchronises; all others of it are timed or checked.
void only_untimed_calls_sync(const char* library, const std::string& folder) {
  for (const bool has_time_passed : {true, false}) {
    const Sweep sweep(library, folder, 4, 4);
    for (int i = 0; i < 32; ++i) {
      if (has_time_passed) g_now_s += 2;
      g_syncs = 0;
      CHECK(sweep.call());
      CHECK(g_syncs == (has_time_passed ? i % 4 == 0 : i == 0));
    }
    g_syncs = 0;
    sweep.finalize();
    CHECK(g_syncs == 1);
  }
}

/// Not something that NCCL does: nobody crashes, and who cannot count does not play.
void overlapping_calls_stop(const char* library, const std::string& folder) {
  const Sweep sweep(library, folder, 1 << 20, 1);
  g_holds = true;
  std::thread first([&] { CHECK(sweep.call()); });
  while (!g_is_held.load()) std::this_thread::yield();
  CHECK(!sweep.call());
  g_holds = false;
  first.join();
  g_is_held = false;
  CHECK(!sweep.call());
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int call = 0; call < 2000; ++call) CHECK(!sweep.call());
    });
  }
  for (std::thread& thread : threads) thread.join();
  sweep.finalize();
}

/// ncclCommAbort finalizes while a call may be inside: neither it nor its report goes meanwhile.
void finalize_waits_for_the_call(const char* library, const std::string& folder, bool for_ever) {
  static const Sweep* last = nullptr;  // so that the leak checker sees the leak as meant
  last = new Sweep(library, folder, 4, 4);
  const Sweep& sweep = *last;
  g_holds = true;
  std::thread caller([&] { CHECK(sweep.call()); });
  while (!g_is_held.load()) std::this_thread::yield();
  std::atomic<bool> is_done{false};
  std::thread aborter([&] {
    sweep.finalize();
    is_done = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  CHECK(!is_done);
  CHECK(!sweep.call());
  if (for_ever) aborter.join();  // it rather leaks
  g_holds = false;
  caller.join();
  g_is_held = false;
  if (for_ever) return;
  aborter.join();
  CHECK(is_done);
  delete last;
}

}  // namespace

int main(int, char** arguments) {
  const std::string folder = std::string(arguments[2]) + "/sweep-threads";
  only_untimed_calls_sync(arguments[1], folder);
  overlapping_calls_stop(arguments[1], folder);
  finalize_waits_for_the_call(arguments[1], folder, false);
  finalize_waits_for_the_call(arguments[1], folder, true);
  return g_failures;
}
