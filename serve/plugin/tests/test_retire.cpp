// ncclCommAbort frees a context from another thread while a call may be inside it: it is not freed
// under the call. Links the plugin's own objects, to hold such a call open.
#include <chrono>
#include <optional>
#include <thread>

#include "adaptive/context.h"
#include "profiler/profiler.h"
#include "tests/adaptive_artifact.h"
#include "tests/check.h"

using namespace dynamiccl;
using std::chrono::milliseconds;

namespace dynamiccl {

struct Inspect {
  static Clock* clock(Context* context) { return context->clock_; }
};

}  // namespace dynamiccl

namespace {

/// A call that has begun; ends with its scope.
class HeldCall {
 public:
  explicit HeldCall(Context* context) : clock_(Inspect::clock(context)) { clock_->begin(); }
  ~HeldCall() { clock_->end(kAllReduce, 1024); }

 private:
  Clock* clock_;
};

Context* g_leaked = nullptr;  // reachable, so that the leak checker sees the leak as meant

/// Of rank 0 of 8, which nobody else will join.
Context* create() {
  int mask = 0;
  Profiler::create({7, 0, 8, 1, &mask, nullptr, true});
  Context* context = Context::create({8, 1, nullptr, nullptr, 7});
  CHECK(context != nullptr);
  return context;
}

void retire_waits_for_the_call() {
  Context* context = create();
  std::atomic<bool> freed{false};
  std::optional<HeldCall> call(std::in_place, context);
  std::thread aborter([&] {
    Context::retire(context);
    freed = true;
  });
  std::this_thread::sleep_for(milliseconds(20));
  CHECK(!freed);
  call.reset();
  aborter.join();
  CHECK(freed);
}

void retire_rather_leaks_than_waits_for_ever() {
  g_leaked = create();
  const HeldCall call(g_leaked);
  Context::retire(g_leaked);  // still there, and answers no more
  float cells[21] = {};
  for (float& cell : cells) cell = 10.0F;
  int num_channels = 0;
  g_leaked->answer(kAllReduce, 1 << 20, {cells, 7, 3}, &num_channels);
  CHECK(num_channels == 0 && cells[4] == 10.0F);
}

}  // namespace

/// The NCCL that a tuner finds in this process (ENABLE_EXPORTS).
extern "C" __attribute__((visibility("default"))) int ncclGetVersion(int* version) {
  *version = 23007;
  return 0;
}

int main(int, char** arguments) {
  const AdaptiveArtifact artifact(arguments[2], "retire", table_of(1, 8, {kRing, kLL128, 8, 1, 0}));
  retire_waits_for_the_call();
  retire_rather_leaks_than_waits_for_ever();
  return g_failures;
}
