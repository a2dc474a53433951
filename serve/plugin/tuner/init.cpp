// Implementation of init.h.
#include "tuner/init.h"

#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "file.h"
#include "identity/communicator.h"
#include "identity/environment.h"
#include "identity/job.h"
#include "platform/threads.h"
#include "tuner/endpoint.h"

namespace dynamiccl {
namespace {

constexpr int kMostHellosInVain = 3;
constexpr std::uint64_t kNsPerMs = 1'000'000;

std::atomic<int> g_hellos_in_vain{0};

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
Outcome agree(const NewCommunicator& communicator, const Checked& checked, Prepared* prepared,
              char (&why_not)[kMaxReasonBytes]) noexcept {
  const Job job = find_job();
  const std::uint64_t parts[] = {job.id, job.restart};
  const std::uint64_t attempt = fnv1a(reinterpret_cast<const std::uint8_t*>(parts), sizeof parts);
  Endpoint endpoint;
  Request vote;
  vote.num_ranks = static_cast<std::uint32_t>(communicator.num_ranks);
  vote.comm_id = communicator.comm_id;
  vote.ids_repeat = checked.ids_repeat ? 1 : 0;
  const std::uint64_t files_until_ms = now_ms() + limit_ms(vote.num_ranks) / 2;
  const char* reason = checked.reason_to_abstain;
  if (reason == nullptr) {
    reason = find_coordinator(communicator.num_nodes, job, attempt, limit_ms(vote.num_ranks) / 2,
                              &endpoint);
  }
  if (reason != nullptr) {
    std::snprintf(why_not, sizeof why_not, "%s", reason);
    return Outcome::kAbstain;
  }
  const std::uint64_t now = now_ms();
  if (checked.ids_repeat) {
    prepare_objection(kIdsRepeat, prepared);
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

}  // namespace

void say(ncclDebugLogger_t logger, ncclDebugLogLevel level, std::size_t num_ranks,
         std::size_t num_nodes, const char* text) noexcept {
  if (logger == nullptr) return;
  char line[kMaxReasonBytes + 128];
  std::snprintf(line, sizeof line, "DYNAMICCL: %zu ranks on %zu nodes: %s", num_ranks, num_nodes,
                text);
  logger(level, NCCL_INIT | NCCL_TUNING, "dynamiccl", __LINE__, "%s", line);
}

ncclResult_t init_communicator(const Communicator& communicator, const char* asked_first,
                               const DecisionTable** table) noexcept {
  *table = nullptr;
  const std::size_t num_ranks = communicator.num_ranks, num_nodes = communicator.num_nodes;
  const ncclDebugLogger_t logger = communicator.logger;
  if (num_ranks < 2 || in_forked_child()) return ncclSuccess;
  const Checked checked = check_communicator(communicator);
  if (is_one("DYNAMICCL_DISABLE")) return ncclSuccess;
  Prepared prepared;
  char reason[kMaxReasonBytes];
  const Outcome outcome =
      agree({num_ranks, num_nodes, communicator.comm_id, checked.nccl_version, asked_first},
            checked, &prepared, reason);
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
