// Creation (slow, may log) comes first; below it the hot path, which only computes.
#include "tuner.h"

#include <time.h>

#include <algorithm>
#include <cinttypes>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

namespace dynamiccl {
namespace {

constexpr std::size_t kMaxPathBytes = 4096;
constexpr std::size_t kMaxLineBytes = kMaxPathBytes + 512;
constexpr std::uint32_t kClosing = 1U << 31;  // in Context::calls_; the other bits count calls
constexpr int kRetireTries = 200;
constexpr long kRetirePauseNs = 1'000'000;
constexpr int kMostAlgorithms = 16;  // NCCL has 7; anything above this is not a cost table

/// Formats a line and hands it to NCCL as one %s, so that no other varargs cross the boundary.
__attribute__((format(printf, 2, 3))) void say(ncclDebugLogger_t logger, const char* format,
                                               ...) noexcept {
  if (logger == nullptr) return;
  char line[kMaxLineBytes];
  va_list arguments;
  va_start(arguments, format);
  const int length = std::vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);
  if (length >= 0) {
    logger(NCCL_LOG_INFO, NCCL_INIT | NCCL_TUNING, "dynamiccl", __LINE__, "%s", line);
  }
}

bool is_slug(const char* text) noexcept {
  if (text[0] == '.' || text[0] == '-' || text[0] == '_') return false;
  return text[std::strspn(text, "abcdefghijklmnopqrstuvwxyz0123456789._-")] == '\0';
}

/// The variable's value; null when it is unset or empty.
const char* value_of(const char* variable) noexcept {
  const char* value = std::getenv(variable);
  return value != nullptr && value[0] != '\0' ? value : nullptr;
}

/// Why this communicator abstains whatever the artifact holds, or null.
const char* reason_to_abstain(const Communicator& communicator) noexcept {
  if (communicator.num_nodes == 0 || communicator.num_ranks % communicator.num_nodes != 0) {
    return "its nodes hold different numbers of ranks";
  }
  const ncclNvlDomainInfo_v5_t* domains = communicator.domains;
  if (domains != nullptr && domains->minRanksPerNvlDomain != domains->maxRanksPerNvlDomain) {
    return "its NVLink domains hold different numbers of ranks";
  }
  if (communicator.abi_version == 2 && (value_of("NCCL_ALGO") || value_of("NCCL_PROTO"))) {
    return "NCCL_ALGO or NCCL_PROTO is set";
  }
  return nullptr;
}

/// Writes the path of the communicator's table; null on success, else why there is none.
const char* find_table(const Communicator& communicator, char (&path)[kMaxPathBytes]) noexcept {
  const char* artifact = value_of("DYNAMICCL_ARTIFACT");
  if (artifact == nullptr) return "DYNAMICCL_ARTIFACT is not set";
  const char* system = value_of("DYNAMICCL_SYSTEM");
  if (system == nullptr) {
    return "DYNAMICCL_SYSTEM is not set; 'dynamiccl-deploy env ARTIFACT' prints it";
  }
  if (!is_slug(system)) return "DYNAMICCL_SYSTEM is not a system's name";
  const int length =
      std::snprintf(path, sizeof path, "%s/tables/%s/nodes%zu_ranks%zu.dct", artifact, system,
                    communicator.num_nodes, communicator.num_ranks);
  const bool fits = length > 0 && static_cast<std::size_t>(length) < sizeof path;
  return fits ? nullptr : "DYNAMICCL_ARTIFACT is too long";
}

/// Loads the communicator's table; null on success, else why not. `path` is for the log line.
const char* load_for(const Communicator& communicator, char (&path)[kMaxPathBytes],
                     DecisionTable* table) noexcept {
  if (const char* reason = reason_to_abstain(communicator)) return reason;
  if (const char* reason = find_table(communicator, path)) return reason;
  if (const char* reason = load_table(path, table)) return reason;
  if (static_cast<std::size_t>(table->num_nodes) != communicator.num_nodes ||
      static_cast<std::size_t>(table->num_ranks) != communicator.num_ranks) {
    return "it was made for another number of ranks or nodes";
  }
  return nullptr;
}

bool is_collnet(int algorithm) noexcept {
  return algorithm == kCollNetDirect || algorithm == kCollNetChain;
}

bool is_nvls(int algorithm) noexcept { return algorithm == kNVLS || algorithm == kNVLSTree; }

/// The knob's values to try: all `count` of them, or one.
struct Range {
  int first;
  int last;
};

Range range_of(int knob, int count) noexcept {
  return knob == kAuto ? Range{0, count - 1} : Range{knob, knob};
}

/// A cost's order as an integer: the bits of floats from 0.0 up sort as the floats do, and those of
/// infinities, NaNs and negative numbers (-1.0: not available) all lie at kNoPrice and above. So
/// one comparison does for "available" and "cheaper", without a branch to mispredict.
using Price = std::uint32_t;
constexpr Price kNoPrice = 0x7f800000;  // infinity
static_assert(kCostIgnore < 0.0F && sizeof(float) == sizeof(Price), "see above");

Price price_of(float cost) noexcept {
  Price bits;
  std::memcpy(&bits, &cost, sizeof bits);
  return bits == 0x80000000 ? 0 : bits;  // -0.0
}

float cost_of(Price price) noexcept {
  float cost;
  std::memcpy(&cost, &price, sizeof cost);
  return cost;
}

/// Whether 2.21, which checks nothing, can run this everywhere that its table was measured.
bool runs_without_cost_table(const Entry& entry, int num_nodes, int nvls_support) noexcept {
  if (entry.algorithm == kAuto || entry.protocol == kAuto) return false;
  if (is_collnet(entry.algorithm) || entry.algorithm > kNVLSTree) return false;
  if (is_nvls(entry.algorithm) && nvls_support != 1) return false;
  // NVLS over several nodes needs CollNet, NVLSTree needs several (v2.21.5-1 `src/enqueue.cc`).
  if (entry.algorithm == kNVLS) return num_nodes == 1;
  return entry.algorithm != kNVLSTree || num_nodes > 1;
}

}  // namespace

Context* Context::create(const Communicator& communicator) noexcept {
  // malloc and placement: plain `new` would need the C++ runtime, and can throw.
  void* memory = std::malloc(sizeof(Context));
  Context* context = memory != nullptr ? new (memory) Context : nullptr;
  char path[kMaxPathBytes] = "";
  const char* reason =
      context != nullptr ? load_for(communicator, path, &context->table_) : "memory is short";
  if (reason == nullptr) {
    say(communicator.logger,
        "DYNAMICCL: %zu ranks on %zu nodes: decisions from %s (hash %016" PRIx64 ", tuner v%d)",
        communicator.num_ranks, communicator.num_nodes, path, context->table_.checksum,
        communicator.abi_version);
    return context;
  }
  std::free(memory);
  say(communicator.logger, "DYNAMICCL: %zu ranks on %zu nodes: NCCL's own choice stands: %s%s%s",
      communicator.num_ranks, communicator.num_nodes, path, path[0] != '\0' ? ": " : "", reason);
  return nullptr;
}

void Context::retire(Context* context) noexcept {
  if (context == nullptr) return;
  context->calls_.fetch_or(kClosing, std::memory_order_acq_rel);
  for (int i = 0; i < kRetireTries; ++i) {
    if (context->calls_.load(std::memory_order_acquire) == kClosing) {
      context->~Context();
      std::free(context);
      return;
    }
    const timespec pause = {0, kRetirePauseNs};
    nanosleep(&pause, nullptr);
  }
}

Context::Call::Call(Context* context) noexcept
    : calls_(context->calls_),
      entered_((calls_.fetch_add(1, std::memory_order_acquire) & kClosing) == 0) {}

Context::Call::~Call() { calls_.fetch_sub(1, std::memory_order_release); }

int choose_cell(const Entry& entry, const CostTable& costs) noexcept {
  if (entry.algorithm >= costs.num_algorithms) return -1;
  Price prices[kMostAlgorithms * kNumProtocols];
  Price cheapest_ring = kNoPrice, cheapest_other = kNoPrice;
  for (int a = 0; a < costs.num_algorithms; ++a) {
    Price& cheapest = a == kRing ? cheapest_ring : cheapest_other;
    for (int cell = a * kNumProtocols; cell < (a + 1) * kNumProtocols; ++cell) {
      prices[cell] = price_of(costs.cells[cell]);
      cheapest = std::min(cheapest, prices[cell]);
    }
  }
  const bool ring_is_relegated =
      cost_of(cheapest_ring) >= kRelegatedCostRatio * cost_of(cheapest_other);

  const Range algorithms = range_of(entry.algorithm, costs.num_algorithms);
  const Range protocols = range_of(entry.protocol, kNumProtocols);
  int chosen = -1;
  Price price = kNoPrice;
  for (int a = algorithms.first; a <= algorithms.last; ++a) {
    if (a == kRing && ring_is_relegated) continue;
    for (int p = protocols.first; p <= protocols.last; ++p) {
      const int cell = a * kNumProtocols + p;
      if (prices[cell] < price) {
        chosen = cell;
        price = prices[cell];
      }
    }
  }
  // A free cell before ours would win NCCL's tie, and the channels would then be another's.
  bool loses_the_tie = false;
  for (int cell = 0; cell < chosen; ++cell) loses_the_tie |= prices[cell] == 0;
  return loses_the_tie ? -1 : chosen;
}

void Context::answer(int collective, std::size_t size_bytes, const CostTable& costs,
                     int* num_channels) noexcept {
  if (costs.num_protocols != kNumProtocols || costs.num_algorithms < 1 ||
      costs.num_algorithms > kMostAlgorithms) {
    return;
  }
  const Call call(this);
  const Entry* entry = call.entered() ? lookup(table_, collective, size_bytes) : nullptr;
  if (entry == nullptr) return;
  const int cell = choose_cell(*entry, costs);
  if (cell < 0) return;
  costs.cells[cell] = 0.0F;
  const int channels = channels_for(*entry, cell / costs.num_protocols);
  if (channels > 0) *num_channels = channels;
}

void Context::answer_v2(int collective, std::size_t size_bytes, int nvls_support, int* algorithm,
                        int* protocol, int* num_channels) noexcept {
  const Call call(this);
  const Entry* entry = call.entered() ? lookup(table_, collective, size_bytes) : nullptr;
  if (entry == nullptr || !runs_without_cost_table(*entry, table_.num_nodes, nvls_support)) return;
  *algorithm = entry->algorithm;
  *protocol = entry->protocol;
  const int channels = channels_for(*entry, entry->algorithm);
  if (channels > 0) *num_channels = channels;
}

int Context::channels_for(const Entry& entry, int algorithm) const noexcept {
  // These use the number unclamped, and more than the communicator has is out of range
  // (`src/enqueue.cc`, scheduleCollTasksToPlan). An algorithm newer than we are is not risked.
  const bool unclamped = is_collnet(algorithm) || algorithm >= kNumAlgorithms ||
                         (is_nvls(algorithm) && table_.num_nodes > 1);
  return unclamped ? 0 : entry.num_channels;
}

}  // namespace dynamiccl
