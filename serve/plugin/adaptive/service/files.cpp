// Implementation of files.h: one thread with a queue.
#include "adaptive/service/files.h"

#include <fcntl.h>
#include <linux/stat.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "file.h"
#include "identity/environment.h"
#include "platform/allocate.h"
#include "platform/threads.h"
#include "trusted/file.h"

namespace dynamiccl {
namespace {

/// Writes atomically: a reader sees the old file or the new one.
void replace_file(const char* path, const char* text, std::size_t size) noexcept {
  char new_path[4128];
  std::snprintf(new_path, sizeof new_path, "%s.new", path);
  const File file(new_path, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW);
  if (!file.is_open() || ::write(file.descriptor(), text, size) != static_cast<ssize_t>(size)) {
    return;
  }
  rename(new_path, path);
}

}  // namespace

/// One job of the thread, for an agreement.
struct Files::Job {
  Job* next;
  void (*task)(void* user, Agreement* agreement);
  void* user;
  Agreement* agreement;  // held
};

std::uint64_t stamp_of_index(const char* artifact) noexcept {
  if (artifact == nullptr) return 0;
  char path[4200];
  std::snprintf(path, sizeof path, "%s/plugin.index", artifact);
  struct statx facts;
  if (syscall(SYS_statx, AT_FDCWD, path, AT_SYMLINK_NOFOLLOW, STATX_BASIC_STATS, &facts) != 0) {
    return 0;
  }
  const std::uint64_t parts[] = {facts.stx_ino, facts.stx_size,
                                 static_cast<std::uint64_t>(facts.stx_mtime.tv_sec),
                                 facts.stx_mtime.tv_nsec};
  return fnv1a(reinterpret_cast<const std::uint8_t*>(parts), sizeof parts) | 1;
}

bool Files::start(const Settings& settings) noexcept {
  if (is_running_) return true;
  const auto copy = [](const char* text) { return text != nullptr ? strdup(text) : nullptr; };
  kill_file_ = copy(settings.kill_file);
  artifact_ = copy(settings.artifact);
  look_interval_ns_ = settings.look_interval_ns;
  if (wake_ < 0) wake_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  is_running_ = wake_ >= 0 && start_thread(run, this, "dynamiccl-files");
  return is_running_;
}

bool Files::prepare(const Events& events, Agreement* agreement) noexcept {
  const Lock lock(&mutex_);
  events_ = events;
  return start(agreement->settings()) && put(events.prepare, agreement);
}

bool Files::renew(Agreement* agreement) noexcept {
  const Lock lock(&mutex_);
  return put(events_.renew, agreement);
}

bool Files::put(void (*task)(void*, Agreement*), Agreement* agreement) noexcept {
  auto* job = static_cast<Job*>(std::malloc(sizeof(Job)));
  if (job == nullptr) return false;
  *job = {nullptr, task, events_.user, agreement->hold()};
  *jobs_end_ = job;
  jobs_end_ = &job->next;
  wake();
  return true;
}

void Files::write(const char* path, char* text, std::size_t size) noexcept {
  const Lock lock(&mutex_);
  if (!is_running_ || text_ != nullptr) return std::free(text);
  text_ = text;
  text_bytes_ = size;
  std::snprintf(text_path_, sizeof text_path_, "%s", path);
  wake();
}

void Files::keep_looking(bool wanted) noexcept {
  if (looks_.exchange(wanted) == wanted || !wanted) return;
  const Lock lock(&mutex_);
  wake();
}

void Files::wake() noexcept {
  const std::uint64_t one = 1;
  if (wake_ >= 0 && ::write(wake_, &one, sizeof one) < 0) return;  // full: it is awake anyway
}

void* Files::run(void* files) noexcept {
  static_cast<Files*>(files)->work();
  return nullptr;
}

void Files::work() noexcept {
  std::uint64_t look_at_ns = 0;
  for (;;) {
    Job* job = nullptr;
    char* text = nullptr;
    std::size_t size = 0;
    char path[sizeof text_path_];
    {
      const Lock lock(&mutex_);
      job = jobs_;
      if (job != nullptr) jobs_ = job->next;
      if (jobs_ == nullptr) jobs_end_ = &jobs_;
      text = text_;
      size = text_bytes_;
      std::memcpy(path, text_path_, sizeof path);
    }
    if (job != nullptr) {
      job->task(job->user, job->agreement);
      std::free(job);
    }
    if (text != nullptr) {
      replace_file(path, text, size);
      std::free(text);
      const Lock lock(&mutex_);
      text_ = nullptr;
    }
    if (job != nullptr || text != nullptr) continue;
    const std::uint64_t now_ns = monotonic_ns();
    if (looks_.load() && now_ns >= look_at_ns) {
      look();
      look_at_ns = monotonic_ns() + look_interval_ns_;
      continue;
    }
    pollfd waited = {wake_, POLLIN, 0};
    const int limit_ms =
        looks_.load() ? static_cast<int>((look_at_ns - now_ns) / 1'000'000 + 1) : -1;
    std::uint64_t drained;
    if (poll(&waited, 1, limit_ms) > 0 && read(wake_, &drained, sizeof drained) < 0) continue;
  }
}

void Files::look() noexcept {
#ifdef DYNAMICCL_TESTS
  // For tests: behaves as a file system that stalls.
  sleep_ns(duration_ns("DYNAMICCL_TEST_STALL_S", 0));
#endif
  sees_kill_file_.store(kill_file_ != nullptr && exists_trusted(kill_file_));
  index_stamp_.store(stamp_of_index(artifact_));
}

}  // namespace dynamiccl
