// When sweep mode's report is written to its file's server, and a finalize beside a call. What it
// plays is in tests/serve/test_sweep.py.
#include <time.h>

#include "tests/check.h"
#include "tests/library.h"
#include "tests/table_file.h"

using namespace dynamiccl;

static std::atomic<int> g_syncs{0};
static std::atomic<bool> g_holds{false};    // the next sync, as long as this is true
static std::atomic<bool> g_is_held{false};  // and it has begun
static std::atomic<time_t> g_now_s{1000};

#define EXPORT extern "C" __attribute__((visibility("default")))

/// In place of the C library's: the sweep library calls them.
EXPORT int fdatasync(int) {
  ++g_syncs;
  const bool is_to_wait = g_holds && !g_is_held.exchange(true);
  while (is_to_wait && g_holds) std::this_thread::yield();
  return 0;
}
EXPORT int clock_gettime(clockid_t, timespec* time) noexcept {
  *time = {g_now_s.load(), 0};
  return 0;
}

namespace {

constexpr std::size_t kSizeBytes = 1024;
constexpr int kCallsPerHalf = 4;

/// Eight ranks, one size, two halves, four blocks of one config: Ring/LL128 with 8 channels.
struct Sweep {
  Sweep(const char* path, const std::string& folder) : library(path, 1) {
    Bytes bytes(kScheduleMagic, kScheduleMagic + 8);
    for (const int value : {1, 1, 8, 4, 2, kCallsPerHalf, 0, 1, 4, 1}) append(&bytes, value, 4);
    append(&bytes, kSizeBytes, 8);
    for (const int value : {1, 1, 8, 1}) append(&bytes, value, 1);
    bytes.resize(bytes.size() + 4 + 2 * 4);
    const std::uint64_t checksum = fnv1a(bytes.data(), bytes.size());
    append(&bytes, checksum, 8);
    char hash[17];
    std::snprintf(hash, sizeof hash, "%016llx", static_cast<unsigned long long>(checksum));
    std::filesystem::create_directories(folder);
    std::filesystem::remove(folder + "/report");
    std::ofstream(folder + "/schedule") << std::string(bytes.begin(), bytes.end());
    setenv("DYNAMICCL_MODE", "sweep", 1);
    setenv("DYNAMICCL_SCHEDULE", (folder + "/schedule").c_str(), 1);
    setenv("DYNAMICCL_SCHEDULE_HASH", hash, 1);
    setenv("DYNAMICCL_SWEEP_REPORT", (folder + "/report").c_str(), 1);
    context = library.init(6, 8, 1, nullptr);
    CHECK(context != nullptr);
  }

  /// One call, which gets the config.
  void call() const {
    const Call call = library.ask(6, context, {kAllReduce, kSizeBytes});
    CHECK(call.num_channels == 8 && call.costs[4] == 0.0F);
  }

  const Library library;
  void* context = nullptr;
};

/// The first call of each half synchronises; all others of it are timed or checked.
void only_untimed_calls_sync(const char* library, const std::string& folder) {
  for (const bool has_time_passed : {true, false}) {
    const Sweep sweep(library, folder);
    for (int i = 0; i < 8 * kCallsPerHalf; ++i) {
      if (has_time_passed) g_now_s += 2;
      g_syncs = 0;
      sweep.call();
      CHECK(g_syncs == (has_time_passed ? i % kCallsPerHalf == 0 : i == 0));
    }
    g_syncs = 0;
    sweep.library.finalize(6, sweep.context);
    CHECK(g_syncs == 1);
  }
}

/// ncclCommAbort finalizes while a call may be inside: neither it nor its report goes meanwhile.
void finalize_waits_for_the_call(const char* library, const std::string& folder) {
  const Sweep sweep(library, folder);
  g_holds = true;
  std::thread caller([&] { sweep.call(); });
  while (!g_is_held) std::this_thread::yield();
  std::thread file_server([] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    g_holds = false;
  });
  sweep.library.finalize(6, sweep.context);
  CHECK(!g_holds);
  caller.join();
  file_server.join();
}

}  // namespace

int main(int, char** arguments) {
  const std::string folder = std::string(arguments[2]) + "/sweep-threads";
  only_untimed_calls_sync(arguments[1], folder);
  finalize_waits_for_the_call(arguments[1], folder);
  return g_failures != 0;
}
