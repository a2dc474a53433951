// What dynamiccl-run has prepared for a communicator, and its one table file.
#include <sys/utsname.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "build_digest.h"
#include "file.h"
#include "identity/environment.h"
#include "platform/clock.h"
#include "tuner/init.h"

namespace dynamiccl {
namespace {

#define DYNAMICCL_FAIL(...)                                                  \
  do {                                                                       \
    std::snprintf(prepared->problem, sizeof prepared->problem, __VA_ARGS__); \
    return;                                                                  \
  } while (false)

struct Kept {
  DecisionTable table;
  Kept* next;
};
Mutex g_mutex;
Kept* g_kept = nullptr;

/// All communicators of one table share it, and it is never freed: NCCL may still ask from another
/// thread while it aborts a communicator.
const DecisionTable* keep(Kept* made) noexcept {
  const Lock lock(&g_mutex);
  for (Kept* kept = g_kept; kept != nullptr; kept = kept->next) {
    if (std::memcmp(&kept->table, &made->table, sizeof made->table) != 0) continue;
    std::free(made);
    return &kept->table;
  }
  made->next = g_kept;
  g_kept = made;
  return &made->table;
}

/// So many numbers of 16 hex digits, and nothing else.
bool parse_hex(const char* text, std::size_t count, std::uint64_t* numbers) noexcept {
  static constexpr char kDigits[] = "0123456789abcdef";
  if (text == nullptr || std::strlen(text) != 16 * count) return false;
  for (std::size_t i = 0; i < 16 * count; ++i) {
    const char* digit = std::strchr(kDigits, text[i]);
    if (digit == nullptr) return false;
    numbers[i / 16] = numbers[i / 16] << 4 | static_cast<std::uint64_t>(digit - kDigits);
  }
  return true;
}

std::uint64_t digest_of(const char* text) noexcept {
  return fnv1a(reinterpret_cast<const std::uint8_t*>(text), std::strlen(text));
}

/// The launcher's number of this process; -1: not known.
std::int32_t world_rank() noexcept {
  for (const char* variable :
       {"RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "PMI_RANK", "PMIX_RANK"}) {
    std::uint64_t rank = 0;
    if (parse_number(value_of(variable), &rank)) return static_cast<std::int32_t>(rank);
  }
  return -1;
}

/// Reads the file into memory of this process, which nobody can cut off or exchange.
void read_table(const File& file, const Communicator& communicator, int nccl_version,
                Prepared* prepared) noexcept {
  const char* problem = why_not_ours(file.descriptor(), S_IFREG);
  if (problem != nullptr) DYNAMICCL_FAIL("its table: %s", problem);
  std::uint8_t bytes[kMaxFileBytes + 1];
  const ssize_t size = file.read_all(bytes, sizeof bytes);
  if (size < 0) DYNAMICCL_FAIL("its table: %s", std::strerror(errno));
  if (static_cast<std::size_t>(size) > kMaxFileBytes) DYNAMICCL_FAIL("its table: it is too long");
  auto* made = static_cast<Kept*>(std::calloc(1, sizeof(Kept)));
  if (made == nullptr) DYNAMICCL_FAIL("memory is short");
  DecisionTable* table = &made->table;
  problem = decode_table(bytes, static_cast<std::size_t>(size), table);
  if (problem == nullptr && !is_for(*table, communicator.num_nodes, communicator.num_ranks)) {
    problem = "it is made for another number of ranks or nodes";
  }
  if (problem != nullptr) {
    std::free(made);
    DYNAMICCL_FAIL("its table: %s", problem);
  }
  prepared->vote.fields[2] = table->checksum;  // of all bytes, as they were read
  leave_out_what_no_job_may_ask(nccl_version, table);
  prepared->table = keep(made);
}

void find_table(const Communicator& communicator, const Checked& checked, const Meeting& meeting,
                Prepared* prepared) noexcept {
  if (checked.ids_repeat) DYNAMICCL_FAIL("a communicator was shrunk before: ids may repeat");
  const char* rearch = value_of("NCCL_ENQUEUE_REARCH_ENABLE");
  if (rearch != nullptr && std::strcmp(rearch, "0") != 0) {  // 2.32 src/tuning/tuning.cc
    DYNAMICCL_FAIL("NCCL_ENQUEUE_REARCH_ENABLE is set: a table would beat kernels it is not shown");
  }
  if (const char* problem = value_of("DYNAMICCL_PROBLEM")) DYNAMICCL_FAIL("%s", problem);
  utsname here = {};
  const char* prepared_on = value_of("DYNAMICCL_HOST");
  if (uname(&here) != 0 || prepared_on == nullptr || std::strcmp(here.nodename, prepared_on) != 0) {
    DYNAMICCL_FAIL("start each rank through dynamiccl-run: this is %.60s, prepared was %.60s",
                   here.nodename, prepared_on != nullptr ? prepared_on : "none");
  }
  const char* kill_file = value_of("DYNAMICCL_KILL_FILE");
  if (meeting.by_word && kill_file != nullptr && may_exist(kill_file)) {
    DYNAMICCL_FAIL("a kill file is there, %.250s", kill_file);
  }
  const char* machine = value_of("DYNAMICCL_MACHINE");
  const char* systems = value_of("DYNAMICCL_SYSTEMS");
  const char* tables = value_of("DYNAMICCL_TABLES");
  Vote& vote = prepared->vote;
  if (machine == nullptr || systems == nullptr || tables == nullptr ||
      !parse_hex(value_of("DYNAMICCL_INDEX"), 1, &vote.fields[1])) {
    DYNAMICCL_FAIL(
        "DYNAMICCL_MACHINE, _SYSTEMS, _TABLES or _INDEX is not set: start the job with "
        "dynamiccl-run");
  }
  vote.fields[6] = digest_of(machine);
  const char* system = find_system(systems, checked.nccl_version);
  const int length = static_cast<int>(std::strcspn(system, " "));
  if (length == 0) {
    DYNAMICCL_FAIL(
        "the artifact does not know NCCL %d on this machine, %.200s: dynamiccl-deploy bind",
        checked.nccl_version, machine);
  }
  char path[4096];
  const int size = std::snprintf(path, sizeof path, "%s/%.*s/nodes%zu_ranks%zu.dct", tables, length,
                                 system, communicator.num_nodes, communicator.num_ranks);
  if (size >= static_cast<int>(sizeof path)) DYNAMICCL_FAIL("DYNAMICCL_TABLES is too long");
  const File file(path);
  if (!file.is_open() && errno == ENOENT) {
    DYNAMICCL_FAIL("the artifact has no table for %zu ranks on %zu nodes of %.*s",
                   communicator.num_ranks, communicator.num_nodes, length, system);
  }
  if (!file.is_open()) DYNAMICCL_FAIL("its table: %s", std::strerror(errno));
  read_table(file, communicator, checked.nccl_version, prepared);
}

}  // namespace

const char* find_meeting(std::size_t num_nodes, Meeting* meeting) noexcept {
  const char* job = value_of("DYNAMICCL_JOB");
  if (job == nullptr) return "start the job with dynamiccl-run";
  if (!parse_hex(job, 1, &meeting->job)) {
    return "DYNAMICCL_JOB is not 16 hex digits; start the job with dynamiccl-run";
  }
  const char* word = value_of("DYNAMICCL_WORD");
  const char* arbiter = value_of("DYNAMICCL_ARBITER");
  const bool is_on_one_host = word != nullptr ? std::strcmp(word, "0") != 0 : arbiter == nullptr;
  meeting->by_word =
      (num_nodes == 1 && is_on_one_host) || (word != nullptr && std::strcmp(word, "all") == 0);
  if (meeting->by_word) return nullptr;
  if (arbiter == nullptr) {
    return "DYNAMICCL_ARBITER is not set, and its ranks may be on several hosts: start each rank "
           "through dynamiccl-run";
  }
  if (!parse_address(arbiter, &meeting->arbiter)) {
    return "DYNAMICCL_ARBITER is not an address and a port, as 10.0.0.1:7000 or [fd00::1]:7000";
  }
  std::uint64_t key[2] = {};
  if (!parse_hex(value_of("DYNAMICCL_KEY"), 2, key)) {
    return "DYNAMICCL_KEY is not 32 hex digits; install the artifact and start the job with "
           "dynamiccl-run";
  }
  meeting->arbiter.key = {key[0], key[1]};
  return nullptr;
}

void prepare(const Communicator& communicator, const Checked& checked, const char* asked_first,
             const Meeting& meeting, Prepared* prepared) noexcept {
  Vote& vote = prepared->vote;
  vote.num_ranks = static_cast<std::uint32_t>(communicator.num_ranks);
  vote.round = {meeting.job, communicator.comm_id, 0};
  vote.nonce = draw();
  vote.rank = world_rank();
  vote.fields[0] = digest_of(kPluginVersion) ^ digest_of(kSourceDigest);
  vote.fields[3] = digest_of(asked_first);
  vote.fields[4] = static_cast<std::uint64_t>(checked.nccl_version);
  vote.fields[5] = std::uint64_t{communicator.num_ranks} << 32 | communicator.num_nodes;
  vote.fields[7] = digest_of("table");
  find_table(communicator, checked, meeting, prepared);
  std::snprintf(vote.problem, sizeof vote.problem, "%.*s",
                static_cast<int>(sizeof vote.problem - 1), prepared->problem);
}

}  // namespace dynamiccl
