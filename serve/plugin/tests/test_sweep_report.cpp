// When the report of sweep mode is written to its file's server: never while a benchmark times.
#include <sys/mman.h>

#include <string>
#include <vector>

#include "sweep/player.h"
#include "tests/check.h"
#include "tests/schedule_file.h"

using namespace dynamiccl;

namespace {

int g_syncs = 0;

}  // namespace

/// In place of the C library's: the plugin's part in this program calls it.
extern "C" int msync(void*, std::size_t, int flags) noexcept {
  CHECK(flags == MS_SYNC);
  ++g_syncs;
  return 0;
}

namespace {

constexpr std::uint64_t kNever = ~0ULL;

/// Number of the calls, from 0 on, in which the report was synced; the last: at the end.
std::vector<int> synced_calls(const SweepDirectory& sweep, const Plan& plan,
                              std::uint64_t every_ns) {
  sweep.write(schedule_of(plan));
  std::vector<int> found;
  int number = 0;
  {
    Player player;
    const std::string hash = hash_of(schedule_of(plan));
    CHECK(player.load(sweep.schedule().c_str(), hash.c_str(), 8, 1) == nullptr);
    std::remove(sweep.report().c_str());
    CHECK(player.report_to(sweep.report().c_str(), every_ns) == nullptr);
    const auto call = [&](std::uint64_t size_bytes) {
      std::vector<float> costs(7 * 3, 10.0F);
      int num_channels = 0;
      g_syncs = 0;
      player.answer(plan.collective, size_bytes, {costs.data(), 7, 3}, &num_channels);
      if (g_syncs > 0) found.push_back(number);
      ++number;
    };
    for (const WarmupRun& run : plan.warmup) {
      for (std::uint64_t i = 0; i < run.num_calls; ++i) call(run.size_bytes);
    }
    for (std::size_t block = 0; block < plan.blocks.size(); ++block) {
      for (int i = 0; i < plan.calls_per_block(); ++i) call(plan.sizes[block % 2]);
    }
    g_syncs = 0;
  }
  if (g_syncs > 0) found.push_back(number);
  return found;
}

/// The first call of each half synchronises, all others of it are timed or checked.
void only_untimed_calls_sync(const SweepDirectory& sweep) {
  const Plan plan;  // 6 calls of warm-up, then 4 blocks of two halves of 4 calls
  const std::vector<int> calls = synced_calls(sweep, plan, 0);
  std::vector<int> wanted = {0, 1, 2, 3, 4, 5};
  for (int half = 0; half < 8; ++half) wanted.push_back(6 + 4 * half);
  wanted.push_back(6 + 32);
  CHECK(calls == wanted);
}

void end_syncs_whatever_the_pace(const SweepDirectory& sweep) {
  const std::vector<int> calls = synced_calls(sweep, Plan(), kNever);
  CHECK(calls == std::vector<int>{6 + 32});
}

}  // namespace

int main(int, char** arguments) {
  const SweepDirectory sweep(arguments[2], "report");
  only_untimed_calls_sync(sweep);
  end_syncs_whatever_the_pace(sweep);
  return g_failures;
}
