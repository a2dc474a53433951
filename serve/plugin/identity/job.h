// Identifies the job and the process in it, from the variables that launchers set.
#pragma once

#include <cstdint>

namespace dynamiccl {

struct Job {
  /// Hash of all variables that identify the job; 0: none is set.
  std::uint64_t id;
  std::uint32_t restart;
  std::int32_t world_rank;  // -1: unknown
  std::int32_t world_size;  // 0: unknown
};

/// Reads DYNAMICCL_JOB_ID, or else what Slurm, torchrun, Open MPI and PMIx set.
Job find_job() noexcept;

}  // namespace dynamiccl
