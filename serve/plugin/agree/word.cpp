// The word of a communicator in /dev/shm.
#include "agree/word.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cinttypes>
#include <climits>
#include <cstring>

#include "file.h"
#include "platform/clock.h"

namespace dynamiccl {
namespace {

constexpr std::uint64_t kNsPerMs = 1'000'000, kNsPerS = 1'000'000'000;

/// Null on failure, with `errno`.
Board* open_board(const char* name) noexcept {
  const int file = open(name, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (file < 0) return nullptr;
  const FileStatus status = status_of(file);
  const bool is_ours = S_ISREG(status.mode) && status.owner == geteuid();
  // ftruncate succeeds on a full tmpfs, and the first write is a SIGBUS.
  const int error = is_ours ? posix_fallocate(file, 0, sizeof(Board)) : EPERM;
  void* memory = MAP_FAILED;
  if (error == 0) {
    memory = mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  }
  close(file);
  if (error != 0) errno = error;
  return memory != MAP_FAILED ? static_cast<Board*>(memory) : nullptr;
}

}  // namespace

bool agree_by_word(const Vote& vote, std::uint64_t limit_ms, bool* waited_in_vain, char* reason,
                   std::size_t reason_size) noexcept {
  *waited_in_vain = false;
  char name[96];
  std::snprintf(name, sizeof name, "/dev/shm/dynamiccl-%u-%016" PRIx64 "-%016" PRIx64,
                static_cast<unsigned>(geteuid()), vote.round.job, vote.round.comm);
  Board* board = open_board(name);
  if (board == nullptr) {
    std::snprintf(reason, reason_size, "its word in /dev/shm cannot be used: %s",
                  std::strerror(errno));
    return false;
  }
  const std::uint64_t until_ns = monotonic_ns() + limit_ms * kNsPerMs;
  const timespec until = {static_cast<time_t>(until_ns / kNsPerS),
                          static_cast<long>(until_ns % kNsPerS)};
  WordVote own(&vote);
  while (own.step() != WordVote::Step::kDone) {
    // The first one writes its fields after its digest: a moment for them, so that one is named.
    if (own.step() == WordVote::Step::kDiffer && !own.has_problem()) sleep_ns(kNsPerMs);
    own.take(board, monotonic_ns() >= until_ns);
    if (own.step() != WordVote::Step::kWait) continue;
    // Until the word is no longer open. An atomic of 32 bits lies as a plain one does; not
    // FUTEX_PRIVATE: ranks are processes.
    syscall(SYS_futex, &board->word, FUTEX_WAIT_BITSET, 0, &until, nullptr, FUTEX_BITSET_MATCH_ANY);
  }
  if (own.has_decided()) syscall(SYS_futex, &board->word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  if (own.came_last()) unlink(name);
  const bool has_table = own.has_table();
  if (!has_table) own.write_reason(reason, reason_size);
  *waited_in_vain = !has_table && own.was_late();
  munmap(board, sizeof(Board));
  return has_table;
}

}  // namespace dynamiccl
