// Creation (slow, may log) comes first; below it the hot path, which only computes.
#include "tuner.h"

#include <time.h>

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

/// Formats a line and hands it to NCCL as one %s, so that no other varargs cross the boundary. NCCL
/// repeats the latest warning in its error report.
__attribute__((format(printf, 3, 4))) void say(const Communicator& communicator,
                                               ncclDebugLogLevel level, const char* format,
                                               ...) noexcept {
  if (communicator.logger == nullptr) return;
  char line[kMaxLineBytes];
  va_list arguments;
  va_start(arguments, format);
  const int length = std::vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);
  if (length >= 0) {
    communicator.logger(level, NCCL_INIT | NCCL_TUNING, "dynamiccl", __LINE__, "%s", line);
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

/// Loads what a sweep is to play; null on success, else why the communicator must not come to be.
/// What fails here on one rank alone would hang all of them later.
const char* load_sweep(const Communicator& communicator, const char* path,
                       Player* player) noexcept {
  if (communicator.abi_version == 2) return "sweep mode needs NCCL 2.22 or later";
  if (path == nullptr) return "DYNAMICCL_SCHEDULE is not set";
  const char* hash = value_of("DYNAMICCL_SCHEDULE_HASH");
  if (hash == nullptr) return "DYNAMICCL_SCHEDULE_HASH is not set";
  const char* reason = player->load(path, hash, communicator.num_ranks, communicator.num_nodes);
  if (reason != nullptr) return reason;
  // Played without them, its measurements would be of something else than they say.
  const bool chunks_are_lost = player->schedule().sets_chunks && communicator.abi_version < 6;
  return chunks_are_lost ? "its chunk sizes need NCCL 2.30 or later" : nullptr;
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

ncclResult_t Context::create(const Communicator& communicator, Context** context) noexcept {
  *context = nullptr;
  const char* mode = value_of("DYNAMICCL_MODE");
  if (mode == nullptr || std::strcmp(mode, "table") == 0) {
    *context = create_for_table(communicator);
    return ncclSuccess;
  }
  if (std::strcmp(mode, "sweep") == 0) {
    *context = create_for_sweep(communicator);
    return *context != nullptr ? ncclSuccess : ncclInvalidUsage;
  }
  say(communicator, NCCL_LOG_INFO,
      "DYNAMICCL: %zu ranks on %zu nodes: NCCL's own choice stands: DYNAMICCL_MODE is '%s'; choose "
      "from table, sweep",
      communicator.num_ranks, communicator.num_nodes, mode);
  return ncclSuccess;
}

Context* Context::create_for_table(const Communicator& communicator) noexcept {
  Context* context = allocate();
  char path[kMaxPathBytes] = "";
  const char* reason =
      context != nullptr ? load_for(communicator, path, &context->table_) : "memory is short";
  if (reason == nullptr) {
    say(communicator, NCCL_LOG_INFO,
        "DYNAMICCL: %zu ranks on %zu nodes: decisions from %s (hash %016" PRIx64 ", tuner v%d)",
        communicator.num_ranks, communicator.num_nodes, path, context->table_.checksum,
        communicator.abi_version);
    return context;
  }
  destroy(context);
  say(communicator, NCCL_LOG_INFO,
      "DYNAMICCL: %zu ranks on %zu nodes: NCCL's own choice stands: %s%s%s", communicator.num_ranks,
      communicator.num_nodes, path, path[0] != '\0' ? ": " : "", reason);
  return nullptr;
}

Context* Context::create_for_sweep(const Communicator& communicator) noexcept {
  Context* context = allocate();
  const char* path = value_of("DYNAMICCL_SCHEDULE");
  const char* reason =
      context != nullptr ? load_sweep(communicator, path, &context->player_) : "memory is short";
  if (reason != nullptr) {
    destroy(context);
    say(communicator, NCCL_LOG_WARN, "DYNAMICCL: %zu ranks on %zu nodes: cannot sweep: %s%s%s",
        communicator.num_ranks, communicator.num_nodes, path != nullptr ? path : "",
        path != nullptr ? ": " : "", reason);
    return nullptr;
  }
  Player& player = context->player_;
  const char* report = value_of("DYNAMICCL_SWEEP_REPORT");
  if (report != nullptr) {
    if (const char* problem = player.report_to(report)) {
      say(communicator, NCCL_LOG_WARN, "DYNAMICCL: %zu ranks on %zu nodes: no sweep report: %s: %s",
          communicator.num_ranks, communicator.num_nodes, report, problem);
    }
  }
  say(communicator, NCCL_LOG_INFO,
      "DYNAMICCL: %zu ranks on %zu nodes: plays %d blocks from %s (hash %016" PRIx64
      ", tuner v%d)%s%s",
      communicator.num_ranks, communicator.num_nodes, player.schedule().num_blocks, path,
      player.schedule().checksum, communicator.abi_version, player.reports() ? ", reports to " : "",
      player.reports() ? report : "");
  return context;
}

Context* Context::allocate() noexcept {
  // malloc and placement: plain `new` would need the C++ runtime, and can throw.
  void* memory = std::malloc(sizeof(Context));
  return memory != nullptr ? new (memory) Context : nullptr;
}

void Context::destroy(Context* context) noexcept {
  if (context == nullptr) return;
  context->~Context();
  std::free(context);
}

void Context::retire(Context* context) noexcept {
  if (context == nullptr) return;
  context->calls_.fetch_or(kClosing, std::memory_order_acq_rel);
  for (int i = 0; i < kRetireTries; ++i) {
    if (context->calls_.load(std::memory_order_acquire) == kClosing) {
      destroy(context);
      return;
    }
    const timespec pause = {0, kRetirePauseNs};
    nanosleep(&pause, nullptr);
  }
}

Context::Call::Call(Context* context) noexcept
    : Call(context, context->calls_.fetch_add(1, std::memory_order_acquire)) {}

Context::Call::Call(Context* context, std::uint32_t calls_before) noexcept
    : calls_(context->calls_),
      entered_((calls_before & kClosing) == 0),
      alone_(calls_before == 0) {}

Context::Call::~Call() { calls_.fetch_sub(1, std::memory_order_release); }

void Context::answer(int collective, std::size_t size_bytes, const CostTable& costs,
                     int* num_channels) noexcept {
  const Call call(this);
  if (!call.entered()) return;
  if (player_.is_loaded()) {
    // NCCL uses a communicator from one thread at a time. Were it not so, nobody could count.
    if (!call.alone()) return player_.stop();
    return player_.answer(collective, size_bytes, costs, num_channels);
  }
  const Entry* entry = lookup(table_, collective, size_bytes);
  if (entry != nullptr && is_sound(costs)) force(*entry, table_.num_nodes, costs, num_channels);
}

void Context::answer_v2(int collective, std::size_t size_bytes, int nvls_support, int* algorithm,
                        int* protocol, int* num_channels) noexcept {
  const Call call(this);
  const Entry* entry = call.entered() ? lookup(table_, collective, size_bytes) : nullptr;
  if (entry == nullptr || !runs_without_cost_table(*entry, table_.num_nodes, nvls_support)) return;
  *algorithm = entry->algorithm;
  *protocol = entry->protocol;
  const int channels = channels_for(*entry, entry->algorithm, table_.num_nodes);
  if (channels > 0) *num_channels = channels;
}

void Context::answer_chunk(int collective, int algorithm, int protocol,
                           std::size_t* chunk_bytes) noexcept {
  const Call call(this);
  if (!call.entered() || !player_.is_loaded()) return;
  if (!call.alone()) return player_.stop();
  player_.answer_chunk(collective, algorithm, protocol, chunk_bytes);
}

}  // namespace dynamiccl
