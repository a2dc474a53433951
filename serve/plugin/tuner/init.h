// A communicator's vote in `init`, for the libraries of tables (exports.cpp, ../vendor) and of mode
// adaptive. Everything returns success, since an error fails a communicator or a collective, but an
// `init`, or a call that is a stop, that heard nothing for the answer limit after it had confirmed
// (agree/ballot.h).
//
// NCCL calls `init` on every rank of every new communicator after all have met in the bootstrap,
// without a lock, each creation of a group on a thread of its own (2.30.7 `src/group.cc:484`): up
// to 2.27 at the end of the creation (2.27.7 `src/init.cc:1452`), from 2.28 on before the cost
// model is made (2.28.9 line 1354, 2.29.7 1447, 2.30.7 1641). An error fails this rank's creation
// and aborts the others of its group (2.27.7 `src/group.cc:416`); the other ranks have the
// communicator and wait in their first collective, from 2.28 on those of its node in a barrier
// (2.30.7 `src/init.cc:1694`). `finalize` may follow with an empty context.
// What dynamiccl-run has prepared for this process is in the environment (docs/environment.md).
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/utsname.h>

#include <algorithm>
#include <cinttypes>
#include <climits>

#include "agree/caller.h"
#include "agree/word.h"
#include "build_digest.h"
#include "nccl/tuner_shell.h"

namespace dynamiccl {

struct Joining {
  const Communicator& communicator;
  /// The vendor's tuner that is called before ours, equal on all ranks.
  const char* asked_first = "none";
  /// Mode adaptive, whose ranks meet at the arbiter, where the leader is.
  bool has_stops = false;
  /// Why this rank cannot use a table; more may be found.
  char problem[320] = "";
  Exchange exchange = {};

  // What the vote needs and leaves.
  Vote vote = {};
  Arbiter arbiter = {};
  bool by_word = false;                  // else by the arbiter
  const DecisionTable* table = nullptr;  // valid until the process ends
  Verdict verdict = Verdict::kAbstain;
};

struct Kept {
  DecisionTable table;
  Kept* next;
};
inline Mutex g_kept_mutex;
inline Kept* g_kept = nullptr;

/// All communicators of one table share it, and it is never freed: NCCL may still ask from another
/// thread while it aborts a communicator.
inline const DecisionTable* keep(Kept* made) noexcept {
  const Lock lock(&g_kept_mutex);
  for (Kept* kept = g_kept; kept != nullptr; kept = kept->next) {
    if (std::memcmp(&kept->table, &made->table, sizeof made->table) != 0) continue;
    std::free(made);
    return &kept->table;
  }
  made->next = g_kept;
  return &(g_kept = made)->table;
}

inline std::uint64_t digest_of(const char* text) noexcept { return fnv1a(text, std::strlen(text)); }

/// Where its ranks meet; null on success, else why nowhere, which is the same on all ranks that
/// were started alike.
inline const char* find_meeting(Joining* joining) noexcept {
  const char* job = value_of("DYNAMICCL_JOB");
  if (job == nullptr) return "start the job with dynamiccl-run";
  if (!parse_hex(job, 1, &joining->vote.round.job)) {
    return "DYNAMICCL_JOB is not 16 hex digits; start the job with dynamiccl-run";
  }
  const char* word = value_of("DYNAMICCL_WORD", "");
  const char* arbiter = value_of("DYNAMICCL_ARBITER");
  const bool is_on_one_host = word[0] != '\0' ? std::strcmp(word, "0") != 0 : arbiter == nullptr;
  const bool may_meet = joining->communicator.num_nodes == 1 && is_on_one_host;
  joining->by_word = !joining->has_stops && (may_meet || std::strcmp(word, "all") == 0);
  if (joining->by_word) return nullptr;
  if (arbiter == nullptr) {
    return "DYNAMICCL_ARBITER is not set, which mode adaptive and ranks on several hosts need: "
           "start each rank through dynamiccl-run";
  }
  if (!parse_address(arbiter, &joining->arbiter)) {
    return "DYNAMICCL_ARBITER is not an address and a port, as 10.0.0.1:7000 or [fd00::1]:7000";
  }
  if (!parse_hex(value_of("DYNAMICCL_KEY"), 2, joining->arbiter.key.halves)) {
    return "DYNAMICCL_KEY is not 32 hex digits; install the artifact and start the job with "
           "dynamiccl-run";
  }
  return nullptr;
}

#define DYNAMICCL_FAIL(...) \
  return static_cast<void>(std::snprintf(joining->problem, sizeof joining->problem, __VA_ARGS__))

/// Reads the table into memory of this process, where nobody can cut it off or exchange it.
inline void read_table(const File& file, Joining* joining) noexcept {
  const Communicator& communicator = joining->communicator;
  const char* problem = why_not_ours(file.descriptor(), S_IFREG);
  if (problem != nullptr) DYNAMICCL_FAIL("its table: %s", problem);
  std::uint8_t bytes[kMaxFileBytes + 1];
  const ssize_t size = file.read_all(bytes, sizeof bytes);
  if (size < 0) DYNAMICCL_FAIL("its table: %s", std::strerror(errno));
  auto* made = static_cast<Kept*>(std::calloc(1, sizeof(Kept)));
  if (made == nullptr) DYNAMICCL_FAIL("memory is short");
  problem = decode_table(bytes, static_cast<std::size_t>(size), &made->table);
  if (problem == nullptr && !is_for(made->table, communicator.num_nodes, communicator.num_ranks)) {
    problem = "it is made for another number of ranks or nodes";
  }
  if (problem != nullptr) {
    std::free(made);
    DYNAMICCL_FAIL("its table: %s", problem);
  }
  joining->vote.fields[2] = made->table.checksum;  // of all bytes, as they were read
  leave_out_what_no_job_may_ask(joining->communicator.nccl_version, &made->table);
  joining->table = keep(made);
}

inline void find_table(Joining* joining) noexcept {
  const Communicator& communicator = joining->communicator;
  const int nccl_version = joining->communicator.nccl_version;
  if (joining->communicator.ids_repeat)
    DYNAMICCL_FAIL("a communicator was shrunk before: ids may repeat");
  if (std::strcmp(value_of("NCCL_ENQUEUE_REARCH_ENABLE", "0"), "0") != 0) {
    // 2.32 src/tuning/tuning.cc
    DYNAMICCL_FAIL("NCCL_ENQUEUE_REARCH_ENABLE is set: a table would beat kernels it is not shown");
  }
  if (const char* problem = value_of("DYNAMICCL_PROBLEM")) DYNAMICCL_FAIL("%s", problem);
  utsname here = {};
  const char* prepared_on = value_of("DYNAMICCL_HOST", "no host");
  if (uname(&here) != 0 || std::strcmp(here.nodename, prepared_on) != 0) {
    DYNAMICCL_FAIL("start each rank through dynamiccl-run: this is %.60s, prepared was %.60s",
                   here.nodename, prepared_on);
  }
  const char* kill_file = value_of("DYNAMICCL_KILL_FILE", "");  // the arbiter looks for it itself
  if (joining->by_word && may_exist(kill_file)) {
    DYNAMICCL_FAIL("a kill file is there, %.250s", kill_file);
  }
  const char* machine = value_of("DYNAMICCL_MACHINE");
  const char* systems = value_of("DYNAMICCL_SYSTEMS");
  const char* tables = value_of("DYNAMICCL_TABLES");
  if (machine == nullptr || systems == nullptr || tables == nullptr ||
      !parse_hex(value_of("DYNAMICCL_INDEX"), 1, &joining->vote.fields[1])) {
    DYNAMICCL_FAIL(
        "DYNAMICCL_MACHINE, _SYSTEMS, _TABLES or _INDEX is not set: start the job with "
        "dynamiccl-run");
  }
  joining->vote.fields[6] = digest_of(machine);
  const char* system = find_system(systems, nccl_version);
  const int length = static_cast<int>(std::strcspn(system, " "));
  if (length == 0) {
    DYNAMICCL_FAIL(
        "the artifact does not know NCCL %d on this machine, %.200s: dynamiccl-deploy bind",
        nccl_version, machine);
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
  read_table(file, joining);
}

/// This rank's vote, and its table.
inline void prepare(Joining* joining) noexcept {
  const Communicator& communicator = joining->communicator;
  Vote& vote = joining->vote;
  vote.num_ranks = static_cast<std::uint32_t>(communicator.num_ranks);
  vote.round.comm = communicator.comm_id;
  vote.nonce = draw();
  vote.rank = world_rank();
  vote.has_stops = joining->has_stops;
  vote.fields[0] = digest_of(kPluginVersion) ^ digest_of(kSourceDigest);
  vote.fields[3] = digest_of(joining->asked_first);
  vote.fields[4] = static_cast<std::uint64_t>(joining->communicator.nccl_version);
  vote.fields[5] = std::uint64_t{communicator.num_ranks} << 32 | communicator.num_nodes;
  vote.fields[7] = digest_of(joining->has_stops ? "adaptive" : "table");
  if (joining->problem[0] == '\0') find_table(joining);
  std::snprintf(vote.problem, sizeof vote.problem, "%.*s",
                static_cast<int>(sizeof vote.problem - 1), joining->problem);
}

/// Null on failure, with `*problem`.
inline Board* open_board(const char* name, const char** problem) noexcept {
  const File file(name, O_RDWR | O_CREAT | O_NOFOLLOW, 0600);
  void* memory = MAP_FAILED;
  int error = EINTR;
  *problem = why_not_ours(file.descriptor(), S_IFREG);
  if (*problem != nullptr) return nullptr;
  // ftruncate succeeds on a full tmpfs, and the first write is a SIGBUS.
  while (error == EINTR) error = posix_fallocate(file.descriptor(), 0, sizeof(Board));
  if (error == 0) {
    const int access = PROT_READ | PROT_WRITE;
    memory = mmap(nullptr, sizeof(Board), access, MAP_SHARED, file.descriptor(), 0);
    error = errno;
  }
  *problem = std::strerror(error);
  return memory != MAP_FAILED ? static_cast<Board*>(memory) : nullptr;
}

/// Why there is no table.
inline void write_reason(const WordVote& own, char* text, std::size_t size) noexcept {
  const std::uint32_t rank = own.word >> 8, why = own.why(), field = why - WordVote::kFirstField;
  char who[24] = "a rank";
  if (rank != WordVote::kNoRank) std::snprintf(who, sizeof who, "rank %u", rank);
  if (why == WordVote::kLate) {
    std::snprintf(text, size, "not all %u ranks came in time", own.vote->num_ranks);
  } else if (why == WordVote::kProblem) {
    std::snprintf(text, size, "%s cannot use a table: its own line says why", who);
  } else {
    const bool is_known = field < kNumFields;
    std::snprintf(text, size, "%s differs from the first%s%s", who, is_known ? " in " : "",
                  is_known ? kFieldNames[field] : "");
  }
}

/// Agrees with the other ranks, all of which are on this host, by a word in /dev/shm that is named
/// by user, job and communicator; at most `limit_ms`. `waited_in_vain`: somebody did not come at
/// all.
///
/// A rank that cannot open the file never votes, so nobody has the table. Whoever comes last
/// removes the name, since all have opened it. Where one does not come it stays, should that one
/// come late, and the next dynamiccl-run of the user sweeps it.
inline Verdict agree_by_word(const Vote& vote, std::uint64_t limit_ms, bool* waited_in_vain,
                             Exchange* exchange) noexcept {
  constexpr std::uint64_t kNsPerMs = 1'000'000, kNsPerS = 1'000'000'000;
  char name[96];  // with a number that another layout of the board changes
  std::snprintf(name, sizeof name, "/dev/shm/dynamiccl-%u-%016" PRIx64 "-%016" PRIx64 "-1",
                static_cast<unsigned>(geteuid()), vote.round.job, vote.round.comm);
  const char* problem = nullptr;
  Board* board = open_board(name, &problem);
  if (board == nullptr) {
    std::snprintf(exchange->reason, sizeof exchange->reason,
                  "its word in /dev/shm cannot be used: %s", problem);
    return Verdict::kAbstain;
  }
  const std::uint64_t until_ns = monotonic_ns() + limit_ms * kNsPerMs;
  const timespec until = {static_cast<time_t>(until_ns / kNsPerS),
                          static_cast<long>(until_ns % kNsPerS)};
  WordVote own(&vote);
  while (own.step != WordVote::Step::kDone) {
    // The first one writes its fields after its digest: a moment for them, so that one is named.
    if (own.step == WordVote::Step::kDiffer && vote.problem[0] == '\0') sleep_ns(kNsPerMs);
    own.take(board, monotonic_ns() >= until_ns);
    if (own.step != WordVote::Step::kWait) continue;
    // Until the word is no longer open. An atomic of 32 bits lies as a plain one does; not
    // FUTEX_PRIVATE: ranks are processes.
    syscall(SYS_futex, &board->word, FUTEX_WAIT_BITSET, 0, &until, nullptr, FUTEX_BITSET_MATCH_ANY);
  }
  if (own.has_decided) syscall(SYS_futex, &board->word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  if (own.came_last) unlink(name);
  munmap(board, sizeof(Board));
  if (own.has_table()) return Verdict::kTable;
  write_reason(own, exchange->reason, sizeof exchange->reason);
  *waited_in_vain = own.why() == WordVote::kLate;
  return Verdict::kAbstain;
}

inline void vote_in_init(Joining* joining) noexcept {
  // How often this process has waited in vain, up to 2. Where hosts share no /dev/shm, or a rank
  // has no plugin, each communicator of a job would wait the whole limit otherwise.
  static std::atomic<unsigned> in_vain{0};
  static constexpr std::uint64_t kDivisors[] = {1, 10, 100};
  unsigned before = in_vain.load();
  const Limits limits = limits_of_job();
  const std::uint64_t wait_ms = limits.vote_ms / kDivisors[before];
  bool was_in_vain = false;
  if (joining->by_word) {
    const std::uint64_t limit_ms = wait_ms + joining->vote.num_ranks;
    joining->verdict = agree_by_word(joining->vote, limit_ms, &was_in_vain, &joining->exchange);
  } else {
    const std::uint64_t from_ms = monotonic_ms();
    joining->verdict =
        agree_by_arbiter(joining->arbiter, joining->vote, limits, wait_ms, &joining->exchange);
    was_in_vain = joining->verdict != Verdict::kTable && monotonic_ms() - from_ms >= wait_ms / 2;
  }
  // What several ranks of a process wait for at once counts once. Whose others came may have to
  // wait for them again, but not as long as the first time.
  if (was_in_vain && before < 2) in_vain.compare_exchange_strong(before, before + 1);
  if (joining->verdict == Verdict::kTable && before == 2)
    in_vain.compare_exchange_strong(before, 1);
}

/// Agrees with the other ranks, once, and says in NCCL's log how that ended. Returns what `init`
/// does; the table is in force with Verdict::kTable alone. Nothing that can fail comes after the
/// vote.
inline ncclResult_t agree_in_init(Joining* joining) noexcept {
  const Communicator& communicator = joining->communicator;
  if (communicator.num_ranks < 2 || is_one("DYNAMICCL_DISABLE")) return ncclSuccess;
  const char* why_not = joining->communicator.reason_to_abstain;
  if (why_not == nullptr) why_not = find_meeting(joining);
  if (why_not == nullptr) {
    prepare(joining);
    vote_in_init(joining);
    why_not = joining->problem[0] != '\0' ? joining->problem : joining->exchange.reason;
  }
  if (joining->verdict == Verdict::kTable) {
    const DecisionTable& table = *joining->table;
    const int size = table.num_collectives * table.num_bins;
    const auto acting = std::count_if(table.entries, table.entries + size,
                                      [](const Entry& entry) { return entry.act != 0; });
    say(communicator, NCCL_LOG_INFO,
        "the artifact's table, from call 0: it acts in %td of %d size bins", acting, size);
    return ncclSuccess;
  }
  if (joining->verdict == Verdict::kAbstain) {
    say(communicator, NCCL_LOG_INFO, "NCCL's own choice stands: %s", why_not);
    return ncclSuccess;
  }
  say(communicator, NCCL_LOG_WARN, "this communicator must not be used: %s", why_not);
  // NCCL bound this thread to the GPU's processors, and does not undo that when `init` fails
  // (2.30.7 `init.cc:1641,1703`). The earlier mask is not known: use all processors of the job.
  cpu_set_t all;
  std::memset(&all, 0xff, sizeof all);
  sched_setaffinity(0, sizeof all, &all);
  return ncclRemoteError;
}

/// The id of this communicator, whose tuner is created next on this thread, as NCCL 2.27 passed it
/// to this library's profiler (comm_id_profiler.cpp); 0: not known.
std::uint64_t take_comm_id(const Communicator& communicator) noexcept;

/// The same for a library of tables: `*table` is null where NCCL's own choice stands.
inline ncclResult_t init_communicator(Communicator communicator, const char* asked_first,
                                      const DecisionTable** table) noexcept {
  if (communicator.abi_version < 5) communicator.comm_id = take_comm_id(communicator);
  communicator = check_communicator(communicator);  // whatever follows
  Joining joining = {communicator, asked_first};
  const ncclResult_t result = agree_in_init(&joining);
  *table = joining.verdict == Verdict::kTable ? joining.table : nullptr;
  return result;
}

/// The entry for what NCCL asks; null: nothing is to be touched.
inline const Entry* entry_for(const DecisionTable& table, const Question& question) noexcept {
  // RCCL has an eighth algorithm.
  const bool is_nccl = is_sound(question.costs) && question.costs.num_algorithms <= kNumAlgorithms;
  if (!is_nccl || !question.is_about_a_cell()) return nullptr;
  return lookup(table, question.collective, question.size_bytes);
}

/// Sets the cost of the chosen cell to 0.0 and the number of channels; or changes nothing.
inline void answer(const DecisionTable& table, const Question& question) noexcept {
  const Entry* entry = entry_for(table, question);
  if (entry != nullptr) choose(*entry, table.num_nodes, question.costs, question.num_channels);
}

}  // namespace dynamiccl
