// The thread that waits for file systems and name servers, so that the agreement's thread never
// does: a stalled NFS server must not keep ranks waiting at a call.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "adaptive/agreement/agreement.h"

namespace dynamiccl {

class Files {
 public:
  /// Both run on the files' thread, which holds a reference to the agreement.
  struct Events {
    void (*prepare)(void* user, Agreement* agreement);
    void (*renew)(void* user, Agreement* agreement);
    void* user;
  };

  /// Have the thread call `prepare`, or `renew`, on it. False: no thread, or out of memory.
  bool prepare(const Events& events, Agreement* agreement) noexcept;
  bool renew(Agreement* agreement) noexcept;

  /// Replace the file at `path` by `text`, which is freed afterwards. Skipped where the previous
  /// version has not been written yet.
  void write(const char* path, char* text, std::size_t size) noexcept;

  /// Whether to poll kill file and index.
  void keep_looking(bool wanted) noexcept;
  bool sees_kill_file() const noexcept { return sees_kill_file_.load(std::memory_order_relaxed); }
  /// Changes whenever plugin.index changes; 0: there is none, or it has not been read.
  std::uint64_t index_stamp() const noexcept {
    return index_stamp_.load(std::memory_order_relaxed);
  }

 private:
  struct Job;
  static void* run(void* files) noexcept;
  bool start(const Settings& settings) noexcept;
  bool put(void (*task)(void*, Agreement*), Agreement* agreement) noexcept;
  void wake() noexcept;
  void work() noexcept;
  void look() noexcept;

  Mutex mutex_;
  bool is_running_ = false;
  Events events_ = {};
  Job* jobs_ = nullptr;
  Job** jobs_end_ = &jobs_;
  char* text_ = nullptr;  // to be written
  std::size_t text_bytes_ = 0;
  char text_path_[4096] = "";

  int wake_ = -1;
  std::atomic<bool> looks_{false};
  std::atomic<bool> sees_kill_file_{false};
  std::atomic<std::uint64_t> index_stamp_{0};
  // The first communicator's.
  char* kill_file_ = nullptr;
  char* artifact_ = nullptr;
  std::uint64_t look_interval_ns_ = 0;
};

/// Of the artifact's plugin.index; 0: there is none.
std::uint64_t stamp_of_index(const char* artifact) noexcept;

}  // namespace dynamiccl
