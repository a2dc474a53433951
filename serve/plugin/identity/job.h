// Which job, which process of it: from what launchers put into the environment.
#pragma once

#include <cstdint>

namespace dynamiccl {

struct Job {
  /// Hash of all that names the job; 0: nothing does.
  std::uint64_t id;
  std::uint32_t restart;
  std::int32_t world_rank;  // -1: unknown
  std::int32_t world_size;  // 0: unknown
};

/// Reads DYNAMICCL_JOB_ID, or else what Slurm, torchrun, Open MPI and PMIx set.
Job find_job() noexcept;

}  // namespace dynamiccl
