// The recorder of this process: takes records from all communicators, writes files and feeds a
// sink.
//
// Environment (read when the first communicator comes):
//   DYNAMICCL_CALLS_DIR      directory for the calls files. Default: none are written.
//   DYNAMICCL_CALLS_MAX_MIB  disk that this process's files may take. Default 256.
//   WORLD_SIZE               torchrun: number of processes of the job.
//   OMPI_COMM_WORLD_SIZE     Open MPI: as WORLD_SIZE.
//   SLURM_NTASKS             Slurm: as WORLD_SIZE.
//   PMI_SIZE                 PMI: as WORLD_SIZE.
#pragma once

#include <atomic>
#include <cstdint>

#include "profiler/calls_file.h"
#include "profiler/record.h"
#include "profiler/ring.h"

namespace dynamiccl {

/// All counts are since the process began.
struct RecorderCounters {
  std::uint64_t taken;    // records that left the ring
  std::uint64_t dropped;  // the ring was full
  std::uint64_t written;  // are in a file
  std::uint64_t lost;     // could not be written: the disk is full, say
};

/// One a process. Its thread runs only while there are communicators and a use for records: a
/// directory, or a sink. Nothing is done in a forked child.
class Recorder {
 public:
  /// Called on the recorder's thread; must not block, nor call the recorder.
  using Sink = void (*)(void* user, const CallRecord& record);

  /// A communicator has come. Null, or why no calls files are written though they were asked for.
  static const char* acquire() noexcept;

  /// A communicator has gone. With the last one all is flushed, and the thread ends; a file system
  /// that hangs is waited for no longer than kStopLimitNs.
  static void release() noexcept;

  /// Hand each record to `sink` as well; null: no longer, and when this returns it is not running.
  static void set_sink(Sink sink, void* user) noexcept;

  /// What the headers of calls files are to say; for files that begin later.
  static void set_facts(const char* plugin_version, const char* fingerprint,
                        std::int32_t nccl_version) noexcept;
  static void set_sampling(std::uint32_t sample_ppm, const char* mode) noexcept;

  /// Whether anybody takes records. When not, they need not be made.
  static bool is_on() noexcept { return s_on.load(std::memory_order_relaxed); }

  /// From any thread; waits for nothing.
  static void push(const CallRecord& record) noexcept {
    Ring* ring = s_ring.load(std::memory_order_acquire);
    if (ring != nullptr) ring->push(record);
  }

  static RecorderCounters counters() noexcept;

 private:
  static constexpr std::uint64_t kStopLimitNs = 2'000'000'000;

  static std::atomic<bool> s_on;
  static std::atomic<Ring*> s_ring;  // lives as long as the process: anybody may be inside
};

}  // namespace dynamiccl
