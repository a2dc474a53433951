// How a communicator's context comes to be: who this rank is, and what the environment asks for.
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

#include "file.h"
#include "history/joins.h"
#include "identity/environment.h"
#include "identity/job.h"
#include "identity/preflight.h"
#include "platform/made.h"
#include "platform/threads.h"
#include "profiler.h"
#include "service/service.h"
#include "tuner.h"

namespace dynamiccl {
namespace {

/// Formats a line and hands it to NCCL as one %s, so that no other varargs cross the boundary. NCCL
/// repeats the latest warning in its error report.
__attribute__((format(printf, 3, 4))) void say(const Communicator& communicator,
                                               ncclDebugLogLevel level, const char* format,
                                               ...) noexcept {
  if (communicator.logger == nullptr) return;
  char line[4096 + 512];
  const int head = std::snprintf(line, sizeof line,
                                 "DYNAMICCL: %zu ranks on %zu nodes: ", communicator.num_ranks,
                                 communicator.num_nodes);
  va_list arguments;
  va_start(arguments, format);
  const int length =
      std::vsnprintf(line + head, sizeof line - static_cast<std::size_t>(head), format, arguments);
  va_end(arguments);
  if (length >= 0) {
    communicator.logger(level, NCCL_INIT | NCCL_TUNING, "dynamiccl", __LINE__, "%s", line);
  }
}

void abstain(const Communicator& communicator, const char* reason) noexcept {
  say(communicator, NCCL_LOG_INFO, "NCCL's own choice stands: %s", reason);
}

/// Why this communicator abstains whatever the artifact holds, or null. The same on all its ranks.
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

struct Identity {
  Member::Place place;
  KnownBy known_by;
  Profiler* profiler;
};

/// The number of a communicator of all ranks, in their order of creation: the same on every rank.
std::atomic<std::uint32_t> g_num_world_communicators{0};

/// Who this rank is in its communicator. Null, or why nobody knows.
///
/// 2.28 on: the tuner is told the commId, and the profiler of the same thread that and the rank.
/// 2.27: the profiler alone is told, as commHash. Before that, and without our profiler: only a
/// communicator of all the launcher's ranks is known, since they create those in one order.
const char* identify(const Communicator& communicator, Identity* identity) noexcept {
  const auto num_ranks = static_cast<std::int32_t>(communicator.num_ranks);
  const auto num_nodes = static_cast<std::int32_t>(communicator.num_nodes);
  const bool has_id = communicator.abi_version >= 5;
  Join join;
  const bool joined = has_id ? take_join_of(communicator.comm_id, &join) : take_latest_join(&join);
  if (joined && join.num_ranks == num_ranks && join.num_nodes == num_nodes && join.rank >= 0 &&
      join.rank < num_ranks) {
    identity->place = {join.comm_id, join.rank, num_ranks, num_nodes};
    identity->known_by = has_id ? KnownBy::kCommId : KnownBy::kCommHash;
    identity->profiler = join.profiler;
    return nullptr;
  }
  const Job job = find_job();
  if (job.world_size != num_ranks || job.world_rank < 0 || job.world_rank >= num_ranks) {
    return "which of its ranks this is, is not known: set NCCL_PROFILER_PLUGIN as well (NCCL 2.27 "
           "or later), or start one process a rank";
  }
  if (!has_id && job.id == 0) return "the launcher names no job; set DYNAMICCL_JOB_ID";
  const std::uint32_t number = g_num_world_communicators.fetch_add(1);
  const std::uint64_t parts[] = {has_id ? communicator.comm_id : job.id, has_id ? 0 : number + 1};
  identity->place = {fnv1a(reinterpret_cast<const std::uint8_t*>(parts), sizeof parts),
                     job.world_rank, num_ranks, num_nodes};
  identity->known_by = KnownBy::kLauncher;
  identity->profiler = nullptr;
  return nullptr;
}

}  // namespace

/// The ways in which a Context is made.
struct Creation {
  static Context* allocate(const Communicator& communicator) noexcept {
    // malloc and placement: plain `new` would need the C++ runtime, and can throw.
    void* memory = std::malloc(sizeof(Context));
    if (memory == nullptr) return nullptr;
    auto* context = new (memory) Context;
    context->num_nodes_ = static_cast<std::int32_t>(communicator.num_nodes);
    context->logger_ = communicator.logger;
    return context;
  }

  static void destroy(Context* context) noexcept {
    if (context == nullptr) return;
    context->~Context();
    std::free(context);
  }

  static bool give_clock(Context* context) noexcept {
    context->clock_ = make<Clock>(Clock::Limits{0, 0});
    context->owns_clock_ = context->clock_ != nullptr;
    return context->owns_clock_;
  }

  static Context* for_agreement(const Communicator& communicator, Settings* settings) noexcept;
  static Context* unsafely(const Communicator& communicator, const Settings& settings) noexcept;
};

Context* Creation::for_agreement(const Communicator& communicator, Settings* settings) noexcept {
  Identity identity;
  const char* reason = nullptr;
  if (settings->artifact == nullptr) reason = "DYNAMICCL_ARTIFACT is not set";
  if (reason == nullptr) reason = identify(communicator, &identity);
  if (reason == nullptr && communicator.num_nodes > 1 && settings->coordinator == nullptr) {
    reason =
        "DYNAMICCL_COORDINATOR is not set, and its nodes have no other way to agree; start the "
        "job with dynamiccl-run";
  }
  if (reason != nullptr) {
    abstain(communicator, reason);
    unmake(settings);
    return nullptr;
  }
  // NCCL 2.21 asks twice about each collective (observed).
  const bool asks_twice = communicator.abi_version == 2;
  if (asks_twice && settings->activate_at != Clock::kNever) {
    settings->activate_at = 2 * settings->activate_at - 1;
  }
  Context* context = allocate(communicator);
  Agreement* agreement =
      Agreement::create(identity.place, identity.known_by, settings);  // takes the settings over
  if (context == nullptr || agreement == nullptr) reason = "memory is short";
  if (reason == nullptr) {
    if (identity.profiler != nullptr) agreement->clock()->heed(identity.profiler->marks());
    agreement->profiler.store(identity.profiler, std::memory_order_release);
    join_service(agreement, &reason);
  }
  if (reason != nullptr) {
    abstain(communicator, reason);
    if (agreement != nullptr) agreement->let_go();
    destroy(context);
    return nullptr;
  }
  if (identity.profiler != nullptr) {
    identity.profiler->set_describe(
        [](void* user, CallRecord* record) { static_cast<Agreement*>(user)->describe(record); },
        agreement);
  }
  context->agreement_ = agreement;
  context->clock_ = agreement->clock();
  return context;
}

Context* Creation::unsafely(const Communicator& communicator, const Settings& settings) noexcept {
  const Member::Place place = {0, 0, static_cast<std::int32_t>(communicator.num_ranks),
                               static_cast<std::int32_t>(communicator.num_nodes)};
  auto* artifact = make<Artifact>();
  Context* context = allocate(communicator);
  TableInForce* table = nullptr;
  const char* reason = "memory is short";
  if (artifact != nullptr && context != nullptr && give_clock(context)) {
    artifact->load(settings, place);
    reason = artifact->problem();
    char hash[2 * kDigestBytes + 1], word[kPreflightBytes];
    to_hex(artifact->hash(), kDigestBytes, hash);
    preflight_word(artifact->hash(), own_fingerprint(), word);
    const char* wanted_hash = value_of("DYNAMICCL_ARTIFACT_SHA256");
    const char* wanted_word = value_of("DYNAMICCL_PREFLIGHT");
    if (reason == nullptr && (wanted_hash == nullptr || std::strcmp(wanted_hash, hash) != 0)) {
      reason = "DYNAMICCL_ARTIFACT_SHA256 is not the hash of its plugin.index";
    }
    if (reason == nullptr && (wanted_word == nullptr || std::strcmp(wanted_word, word) != 0)) {
      reason = "DYNAMICCL_PREFLIGHT is not what 'dynamiccl-deploy doctor --all-ranks' gives here";
    }
    if (reason == nullptr) {
      table = TableInForce::decode(artifact->table(), artifact->table_bytes(), 1);
      reason = table == nullptr ? "memory is short" : nullptr;
    }
    if (reason == nullptr) {
      say(communicator, NCCL_LOG_INFO,
          "decisions of %s (artifact %.12s, system %s; %d of %d bins decided) from the first call "
          "on, WITHOUT asking the other ranks (DYNAMICCL_UNSAFE)",
          settings.artifact, hash, artifact->system(), artifact->num_decided(),
          artifact->num_entries());
    } else {
      abstain(communicator, reason);
    }
  } else {
    abstain(communicator, reason);
  }
  unmake(artifact);
  if (reason == nullptr) {
    context->clock_->adopt(table);
    return context;
  }
  destroy(context);
  return nullptr;
}

ncclResult_t Context::create(const Communicator& communicator, Context** context) noexcept {
  *context = nullptr;
  if (in_forked_child()) return ncclSuccess;
  if (is_one("DYNAMICCL_DISABLE")) {
    abstain(communicator, "DYNAMICCL_DISABLE is 1");
    return ncclSuccess;
  }
  const Mode mode = find_mode();
  if (mode == Mode::kUnknown) {
    say(communicator, NCCL_LOG_INFO,
        "NCCL's own choice stands: DYNAMICCL_MODE is '%s'; choose from table, table-static, "
        "observe, adaptive",
        value_of("DYNAMICCL_MODE"));
    return ncclSuccess;
  }
  const char* reason = mode == Mode::kObserve ? "DYNAMICCL_MODE is observe" : nullptr;
  if (reason == nullptr) reason = reason_to_abstain(communicator);
  if (reason != nullptr || communicator.num_ranks < 2) {
    if (reason != nullptr) abstain(communicator, reason);
    return ncclSuccess;
  }
  auto* settings = make<Settings>();
  if (settings == nullptr || !settings->read()) {
    unmake(settings);
    abstain(communicator, "memory is short");
    return ncclSuccess;
  }
  if (settings->coordinator == nullptr && is_one("DYNAMICCL_UNSAFE")) {
    *context = Creation::unsafely(communicator, *settings);
    unmake(settings);
  } else {
    *context = Creation::for_agreement(communicator, settings);
  }
  return ncclSuccess;
}

}  // namespace dynamiccl
