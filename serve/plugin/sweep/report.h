// The report of sweep mode: what was played, in a file that outlives a kill.
#pragma once

#include <cstddef>
#include <cstdint>

#include "vocabulary.h"

namespace dynamiccl {

/// A mapped file of which every byte is reserved on disk. Without a file every call does nothing.
/// The format is in dynamiccl/schedule.py.
///
/// A store reaches the file though the process is killed, and makes no system call; but the kernel
/// may have to make the page writable first, which can take long on a network file system. So what
/// a benchmark times should not store: see Player. Nor need an NFS client write such pages before
/// it wants their memory: `sync` sends them, in a call that nobody times, and so does the end.
class Report {
 public:
  Report() = default;
  ~Report();
  Report(const Report&) = delete;
  Report& operator=(const Report&) = delete;

  /// Create the file; null on success, and when another rank has created it and reports, else why
  /// there is none.
  const char* create(const char* path, std::int32_t num_blocks, std::uint64_t checksum) noexcept;

  bool is_open() const noexcept { return header_ != nullptr; }

  /// Write what was stored to the file's server, unless that was done less than `every_ns` ago.
  void sync(std::uint64_t every_ns) noexcept;

  void set_calls(std::uint64_t calls) noexcept {
    if (header_ != nullptr) header_->calls = calls;
  }
  void set_state(std::int32_t block, BlockState state) noexcept {
    if (header_ != nullptr) states_[block] = state;
  }
  /// Keeps the smallest that a block got.
  void set_chunk(std::int32_t block, std::uint32_t chunk_bytes) noexcept;
  void set_stop(std::uint64_t call, std::uint64_t expected_bytes, std::uint64_t found_bytes,
                int found_collective) noexcept;

 private:
  struct Header {
    std::uint8_t magic[8];
    std::uint32_t version;
    std::int32_t num_blocks;
    std::uint64_t checksum;
    std::uint64_t calls;
    std::uint64_t stopped_at_call;
    std::uint64_t expected_bytes;
    std::uint64_t found_bytes;
    std::int32_t found_collective;
    std::int32_t zero;
  };
  static_assert(sizeof(Header) == kReportHeaderBytes, "the file's header, byte for byte");
  static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the file's numbers are little-endian");

  Header* header_ = nullptr;
  std::uint32_t* chunks_ = nullptr;
  std::uint8_t* states_ = nullptr;
  std::size_t size_bytes_ = 0;
  std::uint64_t synced_ns_ = 0;  // CLOCK_MONOTONIC
};

}  // namespace dynamiccl
