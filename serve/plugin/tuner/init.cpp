// Implementation of init.h.
#include "tuner/init.h"

#include <dlfcn.h>
#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

#include "file.h"
#include "identity/environment.h"
#include "identity/job.h"
#include "platform/old_symbols.h"
#include "platform/threads.h"
#include "tuner/endpoint.h"

DYNAMICCL_OLD_SYMBOL(dladdr);
DYNAMICCL_OLD_SYMBOL(dlclose);
DYNAMICCL_OLD_SYMBOL(dlopen);
DYNAMICCL_OLD_SYMBOL(dlsym);

namespace dynamiccl {
namespace {

/// Releases whose tuner calls were read in the source, or tested: 2.22 to 2.32.
constexpr int kOldestVersion = 22200, kNewestVersion = 23299;
constexpr int kMostHellosInVain = 3;
constexpr std::uint64_t kNsPerMs = 1'000'000;

Mutex g_mutex;
/// All communicator ids that this process has seen, parents of shrunk communicators included.
struct Id {
  std::uint64_t id;
  const Id* earlier;
};
const Id* g_ids = nullptr;
bool g_ids_repeat = false;
bool g_world_is_taken = false;
std::atomic<int> g_hellos_in_vain{0};

/// Finds the communicator's id where NCCL does not pass it; null on success, else why not.
const char* find_id(const NewCommunicator& communicator, const Job& job,
                    std::uint64_t* id) noexcept {
  *id = communicator.comm_id;
  if (value_of("NCCL_COMM_ID") != nullptr) {
    return "NCCL_COMM_ID is set, which gives all communicators one id";
  }
  if (*id != 0) return nullptr;
  if (!is_one("DYNAMICCL_ONE_WORLD")) {
    return "this NCCL does not say which communicator it is: on 2.27 start the job with "
           "dynamiccl-run; before, DYNAMICCL_ONE_WORLD=1 promises that no second communicator of "
           "all ranks is made at the same time";
  }
  if (job.world_size != static_cast<std::int32_t>(communicator.num_ranks)) {
    return "before NCCL 2.27 only a communicator of all ranks is known";
  }
  const Lock lock(&g_mutex);
  if (g_world_is_taken) return "before NCCL 2.27 only the first communicator of all ranks is known";
  g_world_is_taken = true;
  *id = 1;
  return nullptr;
}

/// The coordinator's endpoint, resolved once a process. Null on success, else why not.
const char* find_coordinator(std::size_t num_nodes, const Job& job, std::uint64_t attempt,
                             std::uint64_t limit_ms, Endpoint* endpoint) noexcept {
  const char* coordinator = value_of("DYNAMICCL_COORDINATOR");
  if (coordinator != nullptr && std::strcmp(coordinator, "none") == 0) coordinator = nullptr;
  if (coordinator == nullptr && num_nodes > 1) {
    return "DYNAMICCL_COORDINATOR is not set; start the job with dynamiccl-run";
  }
  if (coordinator == nullptr && job.id == 0) {
    return "the launcher names no job; set DYNAMICCL_JOB_ID, or start it with dynamiccl-run";
  }
  if (coordinator == nullptr) {
    local_endpoint(attempt, endpoint);
    return nullptr;
  }
  static Mutex mutex;  // who waits for it has the same limit
  static Endpoint found;
  static const char* why_not = nullptr;
  static bool is_looked_up = false;
  const Lock lock(&mutex);
  if (!is_looked_up) {
    why_not = find_endpoint(coordinator, value_of("DYNAMICCL_KEY_FILE"), limit_ms, &found);
    is_looked_up = true;
  }
  *endpoint = found;
  return why_not;
}

void describe_self(const Job& job, char (&who)[kMaxWhoBytes]) noexcept {
  char host[64] = "";
  gethostname(host, sizeof host - 1);
  if (job.world_rank >= 0) {
    std::snprintf(who, sizeof who, "rank %d of the launcher (%s, pid %d)", job.world_rank, host,
                  static_cast<int>(getpid()));
  } else {
    std::snprintf(who, sizeof who, "%s, pid %d", host, static_cast<int>(getpid()));
  }
}

void ask_until_decided(Voter* voter, const Endpoint& endpoint, std::uint64_t attempt) noexcept {
  while (voter->outcome() == Outcome::kOpen) {
    const std::uint64_t now = now_ms();
    if (voter->send_at_ms() > now) {
      sleep_ns((voter->send_at_ms() - now) * kNsPerMs);
    } else {
      if (!voter->has_confirmed()) try_to_coordinate(endpoint, attempt);
      Answer answer;
      if (ask(endpoint, voter->request(), voter->patience_ms(now), &answer)) {
        voter->hear(answer, now_ms());
      } else {
        voter->hear_nothing(now_ms());
      }
    }
    voter->look_at_clock(now_ms());
  }
}

/// Why this communicator abstains whatever an artifact holds, or null; equal on all ranks.
const char* reason_to_abstain(const NewCommunicator& communicator) noexcept {
  if (communicator.is_rccl) return "this is RCCL, whose algorithms are others";
  if (communicator.num_nodes == 0 || communicator.num_ranks % communicator.num_nodes != 0) {
    return "its nodes hold different numbers of ranks";
  }
  if (!communicator.is_even) return "its NVLink domains hold different numbers of ranks";
  if (communicator.nccl_version < kOldestVersion || communicator.nccl_version > kNewestVersion) {
    return "this release of NCCL has not been tried";
  }
  return nullptr;
}

/// How long to wait for a coordinator. Shorter after each failure in this process, but never 0: the
/// job's first communicators may have no rank on the coordinator's host, and a later one has.
std::uint64_t hello_limit_ms(std::uint32_t num_ranks) noexcept {
  const int in_vain = g_hellos_in_vain.load();
  if (in_vain == 0) return limit_ms(num_ranks) / 2;
  return in_vain < kMostHellosInVain ? short_limit_ms(num_ranks) : short_limit_ms(num_ranks) / 10;
}

/// Agrees with the other ranks; returns within 6 limits (voter.h) and half a second: half a limit
/// for files and the coordinator's address, half for the coordinator, 2 until all have voted, 3
/// once this rank has confirmed. More than 2 only if the coordinator is lost.
Outcome agree(const NewCommunicator& communicator, Prepared* prepared,
              char (&why_not)[kMaxReasonBytes]) noexcept {
  const Job job = find_job();
  const std::uint64_t parts[] = {job.id, job.restart};
  const std::uint64_t attempt = fnv1a(reinterpret_cast<const std::uint8_t*>(parts), sizeof parts);
  Endpoint endpoint;
  Request vote;
  vote.num_ranks = static_cast<std::uint32_t>(communicator.num_ranks);
  // Note the id first: it must be remembered whatever follows.
  vote.ids_repeat = note_id(communicator.comm_id) ? 1 : 0;
  const std::uint64_t files_until_ms = now_ms() + limit_ms(vote.num_ranks) / 2;
  const char* reason = find_id(communicator, job, &vote.comm_id);
  if (reason == nullptr) reason = reason_to_abstain(communicator);
  if (reason == nullptr) {
    reason = find_coordinator(communicator.num_nodes, job, attempt, limit_ms(vote.num_ranks) / 2,
                              &endpoint);
  }
  if (reason != nullptr) {
    std::snprintf(why_not, sizeof why_not, "%s", reason);
    return Outcome::kAbstain;
  }
  const std::uint64_t now = now_ms();
  if (vote.ids_repeat != 0) {
    prepare_objection("a communicator was shrunk before: ids may repeat", prepared);
  } else if (is_switched_on("NCCL_ENQUEUE_REARCH_ENABLE")) {  // 2.32 src/tuning/tuning.cc
    prepare_objection(
        "NCCL_ENQUEUE_REARCH_ENABLE is set: a table would beat kernels it is not shown", prepared);
  } else {
    prepare(communicator, files_until_ms > now ? files_until_ms - now : 0, prepared);
  }
  vote.attempt = attempt;
  vote.nonce = draw_number();
  std::memcpy(vote.identity, prepared->identity, sizeof vote.identity);
  describe_self(job, vote.who);
  Voter voter(vote, prepared->table == nullptr, hello_limit_ms(vote.num_ranks), now_ms());
  ask_until_decided(&voter, endpoint, attempt);
  if (voter.has_voted()) {
    g_hellos_in_vain.store(0);
  } else {
    g_hellos_in_vain.fetch_add(1);
  }
  std::snprintf(why_not, sizeof why_not, "%s", voter.reason());
  return voter.outcome();
}

/// The result of ncclGetVersion in a loaded library (null: in the program and what it is linked
/// with), such as 22809 for 2.28.9; 0 where there is none.
int nccl_version_in(const char* library) noexcept {
  void* handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
  if (handle == nullptr) return 0;
  const auto get = reinterpret_cast<int (*)(int*)>(dlsym(handle, "ncclGetVersion"));
  int version = 0;
  if (get != nullptr && get(&version) != 0) version = 0;
  dlclose(handle);  // only the count that RTLD_NOLOAD added
  return version;
}

}  // namespace

bool note_id(std::uint64_t id) noexcept {
  const Lock lock(&g_mutex);
  bool known = id == 0;
  for (const Id* seen = g_ids; seen != nullptr; seen = seen->earlier) {
    g_ids_repeat |= id_of_shrunk(seen->id) == id;
    known |= seen->id == id;
  }
  if (known || g_ids_repeat) return g_ids_repeat;
  auto* seen = static_cast<Id*>(std::malloc(sizeof(Id)));
  g_ids_repeat = seen == nullptr;  // nobody could tell any more
  if (seen != nullptr) g_ids = new (seen) Id{id, g_ids};
  return g_ids_repeat;
}

std::uint64_t id_of_shrunk(std::uint64_t parent_id) noexcept {
  // Hash input: the parent's id, the child's number and its colour, both a 4-byte 0.
  const std::uint64_t numbers[] = {parent_id, 0, 0};
  const std::uint64_t sizes[] = {8, 4, 4};
  std::uint64_t first = 1, second = 1;
  for (int i = 0; i < 3; ++i) {
    first = (first ^ sizes[i]) + second;
    second ^= first;
    first = (first ^ first >> 31) * 0x9de62bbc8cef3ce3U;
    second = (second ^ second >> 32) * 0x485cd6311b599e79U;
    first += numbers[i];
  }
  const std::uint64_t mixed = (first ^ first >> 31) * 0xbac3bd562846de6bU + second;
  return (mixed ^ mixed >> 32) * 0x995a187a14e7b445U;
}

void say(ncclDebugLogger_t logger, ncclDebugLogLevel level, std::size_t num_ranks,
         std::size_t num_nodes, const char* text) noexcept {
  if (logger == nullptr) return;
  char line[kMaxReasonBytes + 128];
  std::snprintf(line, sizeof line, "DYNAMICCL: %zu ranks on %zu nodes: %s", num_ranks, num_nodes,
                text);
  logger(level, NCCL_INIT | NCCL_TUNING, "dynamiccl", __LINE__, "%s", line);
}

ncclResult_t init_communicator(std::size_t num_ranks, std::size_t num_nodes, std::uint64_t comm_id,
                               const ncclNvlDomainInfo_v5_t* domains, ncclDebugLogger_t logger,
                               const char* asked_first, const DecisionTable** table) noexcept {
  *table = nullptr;
  if (num_ranks < 2 || in_forked_child()) return ncclSuccess;
  if (is_one("DYNAMICCL_DISABLE")) {
    note_id(comm_id);
    return ncclSuccess;
  }
  const bool is_even =
      domains == nullptr || domains->minRanksPerNvlDomain == domains->maxRanksPerNvlDomain;
  // A process may have loaded two NCCLs: the caller is the one that contains the logger.
  Dl_info nccl = {};
  const bool is_found = dladdr(reinterpret_cast<void*>(logger), &nccl) != 0;
  const char* library = is_found && nccl.dli_fname != nullptr ? nccl.dli_fname : "";
  int nccl_version = library[0] != '\0' ? nccl_version_in(library) : 0;
  if (nccl_version == 0) nccl_version = nccl_version_in(nullptr);
  const bool is_rccl = std::strstr(library, "librccl") != nullptr;
  Prepared prepared;
  char reason[kMaxReasonBytes];
  const Outcome outcome =
      agree({num_ranks, num_nodes, comm_id, nccl_version, is_rccl, is_even, asked_first}, &prepared,
            reason);
  if (outcome == Outcome::kTable) {
    *table = prepared.table;
    say(logger, NCCL_LOG_INFO, num_ranks, num_nodes, "the artifact's table, from call 0");
    return ncclSuccess;
  }
  const bool failed = outcome == Outcome::kFailed;
  char text[kMaxReasonBytes + 64];
  std::snprintf(text, sizeof text, "%s: %s",
                failed ? "this communicator must not be used" : "NCCL's own choice stands", reason);
  say(logger, failed ? NCCL_LOG_WARN : NCCL_LOG_INFO, num_ranks, num_nodes, text);
  if (!failed) return ncclSuccess;
  // NCCL bound this thread to the GPU's processors, and does not undo that when `init` fails
  // (2.30.7 `init.cc:1641,1703`). The earlier mask is not known: use all processors of the job.
  cpu_set_t all;
  std::memset(&all, 0xff, sizeof all);
  sched_setaffinity(0, sizeof all, &all);
  return ncclRemoteError;
}

}  // namespace dynamiccl
