// The word of a communicator in /dev/shm.
#include "agree/word.h"

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>

#include <cinttypes>
#include <climits>
#include <cstring>

#include "file.h"
#include "platform/clock.h"

namespace dynamiccl {
namespace {

/// Null on failure, with `*problem`.
Board* open_board(const char* name, const char** problem) noexcept {
  const File file(name, O_RDWR | O_CREAT | O_NOFOLLOW, 0600);
  void* memory = MAP_FAILED;
  int error = errno;
  *problem = file.is_open() ? why_not_ours(file.descriptor(), S_IFREG) : std::strerror(error);
  if (*problem != nullptr) return nullptr;
  // ftruncate succeeds on a full tmpfs, and the first write is a SIGBUS.
  do error = posix_fallocate(file.descriptor(), 0, sizeof(Board));
  while (error == EINTR);
  if (error == 0) {
    const int access = PROT_READ | PROT_WRITE;
    memory = mmap(nullptr, sizeof(Board), access, MAP_SHARED, file.descriptor(), 0);
    error = errno;
  }
  *problem = std::strerror(error);
  return memory != MAP_FAILED ? static_cast<Board*>(memory) : nullptr;
}

/// Why there is no table.
void write_reason(const WordVote& own, char* text, std::size_t size) noexcept {
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

}  // namespace

bool agree_by_word(const Vote& vote, std::uint64_t limit_ms, bool* waited_in_vain, char* reason,
                   std::size_t reason_size) noexcept {
  constexpr std::uint64_t kNsPerMs = 1'000'000, kNsPerS = 1'000'000'000;
  *waited_in_vain = false;
  char name[96];  // with a number that another layout of the board changes
  std::snprintf(name, sizeof name, "/dev/shm/dynamiccl-%u-%016" PRIx64 "-%016" PRIx64 "-1",
                static_cast<unsigned>(geteuid()), vote.round.job, vote.round.comm);
  const char* problem = nullptr;
  Board* board = open_board(name, &problem);
  if (board == nullptr) {
    std::snprintf(reason, reason_size, "its word in /dev/shm cannot be used: %s", problem);
    return false;
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
  if (own.has_table()) return true;
  write_reason(own, reason, reason_size);
  *waited_in_vain = own.why() == WordVote::kLate;
  return false;
}

}  // namespace dynamiccl
