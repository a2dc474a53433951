// See agree.h.
#include "tuner/agree.h"

#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "file.h"
#include "identity/environment.h"
#include "identity/job.h"
#include "platform/threads.h"
#include "tuner/endpoint.h"

namespace dynamiccl {
namespace {

/// Releases whose use of a tuner was read, or seen: 2.22 to 2.32.
constexpr int kOldestVersion = 22200, kNewestVersion = 23299;
constexpr int kMostHellosInVain = 3;
constexpr std::uint64_t kNsPerMs = 1'000'000;

Mutex g_mutex;
/// Every id that this process was told: a shrunk communicator's parent is among them.
std::uint64_t* g_ids = nullptr;
std::size_t g_num_ids = 0, g_ids_capacity = 0;
bool g_ids_repeat = false;
bool g_world_is_taken = false;
Endpoint g_endpoint;
bool g_has_endpoint = false;
const char* g_why_no_endpoint = nullptr;
std::atomic<int> g_hellos_in_vain{0};

/// Finds the communicator's id where NCCL does not tell it; null, or why there is none.
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

/// The coordinator's place, looked up once a process. Null, or why there is none.
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
  {
    const Lock lock(&g_mutex);
    *endpoint = g_endpoint;
    if (g_has_endpoint || g_why_no_endpoint != nullptr) return g_why_no_endpoint;
  }
  const char* why_not =
      find_endpoint(coordinator, value_of("DYNAMICCL_KEY_FILE"), limit_ms, endpoint);
  const Lock lock(&g_mutex);
  if (why_not == nullptr) g_endpoint = *endpoint;
  g_has_endpoint |= why_not == nullptr;
  g_why_no_endpoint = g_has_endpoint ? nullptr : why_not;
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

/// Why this communicator abstains whatever an artifact holds; the same on all its ranks.
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

/// How long to wait for a coordinator. In a process that has waited in vain before less and less,
/// and always a little: the job's first communicators may have no rank on the coordinator's host,
/// and a later one does.
std::uint64_t hello_limit_ms(std::uint32_t num_ranks) noexcept {
  const int in_vain = g_hellos_in_vain.load();
  if (in_vain == 0) return limit_ms(num_ranks) / 2;
  return in_vain < kMostHellosInVain ? short_limit_ms(num_ranks) : short_limit_ms(num_ranks) / 10;
}

}  // namespace

bool note_id(std::uint64_t id) noexcept {
  const Lock lock(&g_mutex);
  bool known = id == 0;
  for (std::size_t i = 0; i < g_num_ids; ++i) {
    g_ids_repeat |= id_of_shrunk(g_ids[i]) == id;
    known |= g_ids[i] == id;
  }
  if (known || g_ids_repeat) return g_ids_repeat;
  if (g_num_ids == g_ids_capacity) {
    const std::size_t more = g_ids_capacity == 0 ? 64 : 2 * g_ids_capacity;
    auto* ids = static_cast<std::uint64_t*>(std::realloc(g_ids, more * sizeof(std::uint64_t)));
    g_ids_repeat = ids == nullptr;  // nobody could tell any more
    if (ids == nullptr) return true;
    g_ids = ids;
    g_ids_capacity = more;
  }
  g_ids[g_num_ids++] = id;
  return false;
}

std::uint64_t id_of_shrunk(std::uint64_t parent_id) noexcept {
  // Three numbers go in: the parent's id, the number of the child and its colour, both a 4-byte 0.
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

void agree(const NewCommunicator& communicator, Agreed* agreed) noexcept {
  *agreed = Agreed{Outcome::kAbstain, nullptr, nullptr, ""};
  const Job job = find_job();
  const std::uint64_t parts[] = {job.id, job.restart};
  const std::uint64_t attempt = fnv1a(reinterpret_cast<const std::uint8_t*>(parts), sizeof parts);
  Endpoint endpoint;
  Request vote;
  vote.num_ranks = static_cast<std::uint32_t>(communicator.num_ranks);
  // The id first: it is remembered whatever follows.
  vote.ids_repeat = note_id(communicator.comm_id) ? 1 : 0;
  const std::uint64_t files_until_ms = now_ms() + limit_ms(vote.num_ranks) / 2;
  const char* reason = find_id(communicator, job, &vote.comm_id);
  if (reason == nullptr) reason = reason_to_abstain(communicator);
  if (reason == nullptr) {
    reason = find_coordinator(communicator.num_nodes, job, attempt, limit_ms(vote.num_ranks) / 2,
                              &endpoint);
  }
  if (reason != nullptr) {
    std::snprintf(agreed->reason, sizeof agreed->reason, "%s", reason);
    return;
  }
  Prepared prepared;
  const std::uint64_t now = now_ms();
  if (vote.ids_repeat != 0) {
    prepare_objection("a communicator was shrunk before: ids may repeat", &prepared);
  } else if (is_switched_on("NCCL_ENQUEUE_REARCH_ENABLE")) {  // 2.32 src/tuning/tuning.cc
    prepare_objection(
        "NCCL_ENQUEUE_REARCH_ENABLE is set: a table would beat kernels it is not shown", &prepared);
  } else {
    prepare({communicator.num_ranks, communicator.num_nodes, communicator.nccl_version,
             communicator.constants, communicator.asked_first},
            files_until_ms > now ? files_until_ms - now : 0, &prepared);
  }
  vote.attempt = attempt;
  vote.nonce = draw_number();
  std::memcpy(vote.identity, prepared.identity, sizeof vote.identity);
  describe_self(job, vote.who);
  Voter voter(vote, !prepared.is_sound(), hello_limit_ms(vote.num_ranks), now_ms());
  ask_until_decided(&voter, endpoint, attempt);
  if (voter.has_voted()) {
    g_hellos_in_vain.store(0);
  } else {
    g_hellos_in_vain.fetch_add(1);
  }
  agreed->outcome = voter.outcome();
  if (voter.outcome() == Outcome::kTable) {
    agreed->table = prepared.table;
    agreed->constants = prepared.constants;
  }
  std::snprintf(agreed->reason, sizeof agreed->reason, "%s", voter.reason());
}

}  // namespace dynamiccl
