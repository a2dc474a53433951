// Implementation of word_file.h.
#include "agree/word_file.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>
#include <cstdio>
#include <cstring>

#include "agree/word.h"
#include "file.h"
#include "platform/clock.h"

namespace dynamiccl {
namespace {

constexpr std::uint64_t kNsPerMs = 1'000'000, kNsPerS = 1'000'000'000;

/// Null on failure, with `reason`.
Board* open_board(const char* name, char* reason, std::size_t reason_size) noexcept {
  const auto fail = [reason, reason_size](const char* what, int error) {
    std::snprintf(reason, reason_size, "%s: %s", what, std::strerror(error));
    return nullptr;
  };
  const int file = open(name, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (file < 0) return fail("its word in /dev/shm cannot be opened", errno);
  const FileStatus status = status_of(file);
  void* memory = MAP_FAILED;
  int error = 0;
  if (!S_ISREG(status.mode) || status.owner != geteuid()) {
    error = EPERM;  // somebody else's, who could change it
  } else {
    // ftruncate succeeds on a full tmpfs, and the first write is a SIGBUS.
    error = posix_fallocate(file, 0, sizeof(Board));
  }
  if (error == 0) {
    memory = mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (memory == MAP_FAILED) error = errno;
  }
  close(file);
  if (error != 0) return fail("its word in /dev/shm cannot be used", error);
  return static_cast<Board*>(memory);
}

/// Sleeps until the word is no longer open, or until `until_ns`.
void wait_for_word(Board* board, std::uint64_t until_ns) noexcept {
  const std::uint64_t now = monotonic_ns();
  if (now >= until_ns) return;
  const std::uint64_t left = until_ns - now;
  const timespec rest = {static_cast<time_t>(left / kNsPerS), static_cast<long>(left % kNsPerS)};
  // An atomic of 32 bits lies as a plain one does; not FUTEX_PRIVATE: ranks are processes.
  syscall(SYS_futex, &board->word, FUTEX_WAIT, 0, &rest, nullptr, 0);
}

}  // namespace

bool agree_by_word(const Vote& vote, std::uint64_t limit_ms, bool* waited_in_vain, char* reason,
                   std::size_t reason_size) noexcept {
  *waited_in_vain = false;
  char name[96];
  std::snprintf(name, sizeof name, "/dev/shm/dynamiccl-%u-%016llx-%016llx-%llu",
                static_cast<unsigned>(geteuid()), static_cast<unsigned long long>(vote.round.job),
                static_cast<unsigned long long>(vote.round.comm),
                static_cast<unsigned long long>(vote.round.number));
  Board* board = open_board(name, reason, reason_size);
  if (board == nullptr) return false;
  const std::uint64_t until_ns = monotonic_ns() + limit_ms * kNsPerMs;
  WordVote own(&vote);
  while (own.step() != WordVote::Step::kDone) {
    // The first one writes its fields after its digest: a moment for them, so that one is named.
    const bool differs = own.step() == WordVote::Step::kDiffer && vote.problem[0] == '\0';
    if (differs) sleep_ns(kNsPerMs);
    own.take(board, monotonic_ns() >= until_ns);
    if (own.step() == WordVote::Step::kWait) wait_for_word(board, until_ns);
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
