// What a rank tells the leader at a stop, the body of its vote: Told, and the times of its latest
// calls. None of it needs to be equal on all ranks: only what is proposed depends on it.
#pragma once

#include <cstdint>

namespace dynamiccl {

enum class InForce : std::uint64_t { kOwnChoice, kTable };

struct Told {
  std::uint64_t lived_ns = 0;   // of the process, since its first communicator
  std::uint64_t waited_ns = 0;  // of that, inside calls at stops of any communicator
  InForce in_force = InForce::kTable;
  std::uint64_t last_table = 0;  // checksum of the file of the table that is, or was, in force
  std::uint32_t num_nodes = 0;   // NCCL's
  std::uint32_t nccl_version = 0;
};
static_assert(sizeof(Told) == 40, "no gaps: it is sent as it lies in memory");

/// The GPU time of one call on this rank; fields of profiler/recorder.h.
struct CallTime {
  std::uint64_t sequence, size_bytes, duration_ns;
  std::uint8_t collective, algorithm, protocol, num_channels, decided, flags;
  std::uint8_t zero[2] = {};
};
static_assert(sizeof(CallTime) == 32, "no gaps");

}  // namespace dynamiccl
