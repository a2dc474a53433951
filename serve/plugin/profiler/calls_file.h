// Files of recorded calls: one writer, rotated, within a bound on disk. Read by collect/calls.py.
//
// A file is a header of kCallsHeaderBytes and then entries of kCallsEntryBytes, each with a
// checksum of its own: a process may be killed while it writes. All numbers are little-endian.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "file.h"
#include "profiler/record.h"

namespace dynamiccl {

inline constexpr std::uint8_t kCallsMagic[8] = {'D', 'C', 'C', 'A', 'L', 'L', 'S', 0};
inline constexpr std::uint32_t kCallsVersion = 1;
inline constexpr std::size_t kCallsHeaderBytes = 512;
inline constexpr std::size_t kCallsEntryBytes = 80;

/// What the header says about the process; texts end in zeros.
struct CallsFacts {
  std::int32_t world_rank;    // -1: unknown
  std::int32_t world_size;    // 0: unknown
  std::int32_t nccl_version;  // as ncclGetVersion gives it; 0: unknown
  std::uint32_t sample_ppm;   // share of calls whose GPU time is taken, parts per million
  char host[64];
  char plugin_version[32];
  char mode[16];
  char job[64];
  char fingerprint[208];
};

/// One entry of a file.
struct CallsEntry {
  CallRecord record;
  std::uint32_t dropped;   // records lost since the entry before: the ring was full
  std::uint32_t checksum;  // low half of fnv1a over the bytes before it
};
static_assert(sizeof(CallsEntry) == kCallsEntryBytes, "the file's entry, byte for byte");

/// Used by one thread at a time, but for the counters. No call blocks anyone else.
class CallsFiles {
 public:
  /// Opens the directory, and makes it when only its last part is missing. It must belong to root
  /// or to this user, and others must not be able to write to it; no link is followed to it. Null
  /// on success, else why nothing will be written. Closed by `close`.
  const char* open(const char* directory, std::uint64_t max_bytes) noexcept;
  bool is_open() const noexcept { return directory_.is_open(); }

  /// Adds to a buffer that is written when it is full. `facts` is for a file that begins here.
  void append(const CallRecord& record, std::uint32_t dropped, const CallsFacts& facts) noexcept;

  /// Write what is buffered. When the disk is full, or the file system says no, that file ends
  /// where its last whole entry does, and nothing is written any more: see `lost`.
  void flush() noexcept;

  void close() noexcept;

  std::uint64_t written() const noexcept { return written_.load(std::memory_order_relaxed); }
  /// Records that did not get onto the disk.
  std::uint64_t lost() const noexcept { return lost_.load(std::memory_order_relaxed); }

 private:
  static constexpr std::size_t kBufferBytes = 64 * 1024;
  static constexpr std::uint32_t kFilesKept = 8;
  static constexpr std::size_t kMaxNameBytes = 160;

  /// Go on with the file before `close`: communicators may come and go many times.
  bool resume_file() noexcept;
  bool begin_file(const CallsFacts& facts) noexcept;
  void end_file() noexcept;
  void name_of(std::uint32_t number, char (&name)[kMaxNameBytes]) const noexcept;
  /// Bytes of `bytes` that are on disk now.
  std::size_t write_all(const void* bytes, std::size_t size) noexcept;
  void lose(std::uint64_t records) noexcept { lost_.fetch_add(records, std::memory_order_relaxed); }

  File directory_;
  int file_ = -1;
  bool broken_ = false;
  std::uint64_t max_file_bytes_ = 0;
  std::uint64_t file_bytes_ = 0;  // of the latest file, in whole entries; 0: begin another
  std::uint32_t next_number_ = 0;
  std::uint32_t oldest_number_ = 0;
  std::atomic<std::uint64_t> written_{0};
  std::atomic<std::uint64_t> lost_{0};
  std::size_t buffered_ = 0;
  char host_[64] = {};
  std::int32_t world_rank_ = -1;
  std::uint8_t buffer_[kBufferBytes];
};

}  // namespace dynamiccl
