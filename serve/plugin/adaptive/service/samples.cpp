// Double buffer: the recorder's thread fills one half while the service's thread sends the other.
#include "adaptive/service/samples.h"

#include <atomic>
#include <cstring>

#include "adaptive/agreement/guard.h"
#include "platform/threads.h"
#include "profiler/recorder.h"

namespace dynamiccl {
namespace {

constexpr std::uint64_t kEveryNs = 50'000'000;
constexpr int kKept = 2048;
constexpr int kAtOnce = 512;

struct Timed {
  std::uint64_t comm_id;
  std::int32_t rank;
  Sample sample;
};

Mutex g_mutex;
Timed g_halves[2][kKept];
int g_filled = 0;
int g_half = 0;
// The service's, and not under the mutex: the recorder calls take() with a lock held that
// set_sink() needs.
int g_watched = 0;
std::atomic<std::uint64_t> g_lost{0};
std::uint64_t g_send_at_ns = 0;

void take(void*, const CallRecord& record) {
  if (record.start_ns == 0 || record.stop_ns <= record.start_ns) return;
  // Launches of a graph share a number, and run what was chosen at their capture.
  if ((record.flags & kFlagCaptured) != 0) return;
  const Lock lock(&g_mutex);
  if (g_filled == kKept) {
    g_lost.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  g_halves[g_half][g_filled++] = {
      record.comm_id,
      record.rank,
      {record.sequence, record.size_bytes, record.stop_ns - record.start_ns, record.collective,
       record.algorithm, record.protocol, record.num_channels, record.decided, record.flags}};
}

}  // namespace

void watch_samples(Agreement* agreement) noexcept {
  if (agreement->profiler.load(std::memory_order_acquire) == nullptr) return;  // it has no times
  agreement->is_watched = true;
  if (g_watched++ == 0) Recorder::set_sink(take, nullptr);
}

void unwatch_samples(Agreement* agreement) noexcept {
  if (!agreement->is_watched) return;
  agreement->is_watched = false;
  if (--g_watched == 0) Recorder::set_sink(nullptr, nullptr);
}

bool send_samples(Agreement* agreements, const Outlet& outlet, std::uint64_t now_ns) noexcept {
  if (now_ns < g_send_at_ns) return false;
  g_send_at_ns = now_ns + kEveryNs;
  const Timed* taken = nullptr;
  int count = 0;
  {
    const Lock lock(&g_mutex);
    taken = g_halves[g_half];
    count = g_filled;
    g_half = 1 - g_half;
    g_filled = 0;
  }
  if (count == 0) return false;
  static std::uint8_t body[kAtOnce * kSampleBytes];
  for (Agreement* each = agreements; each != nullptr; each = each->next) {
    if (!each->begun || each->has_ended()) continue;
    Message message{};
    message.kind = MessageKind::kSamples;
    message.comm_id = each->place().comm_id;
    message.rank = each->place().rank;
    message.body = body;
    for (int i = 0; i <= count; ++i) {
      const bool is_full = message.body_bytes == sizeof body;
      if ((i == count || is_full) && message.body_bytes > 0) {
        outlet.send(each, 0, message);
        message.body_bytes = 0;
      }
      if (i == count) break;
      if (taken[i].comm_id != message.comm_id || taken[i].rank != message.rank) continue;
      write_sample(taken[i].sample, body + message.body_bytes);
      message.body_bytes += kSampleBytes;
    }
  }
  return true;
}

std::uint64_t samples_lost() noexcept { return g_lost.load(std::memory_order_relaxed); }

}  // namespace dynamiccl
