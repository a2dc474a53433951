// Identifies the job and the process in it, from the variables that launchers set.
//
//   DYNAMICCL_JOB_ID            names the job; the same on all its ranks, and another for each
//   step.
//                               Default: what the launcher sets.
//   DYNAMICCL_RESTART           which attempt of the job this is. Default: Slurm's count.
//   RANK                        torchrun: this process among all of the job.
//   OMPI_COMM_WORLD_RANK        Open MPI: as RANK, where that is not set.
//   OMPI_MCA_ess_base_jobid     Open MPI: names the job.
//   SLURM_PROCID                Slurm: as RANK, where neither of the former is set.
//   SLURM_STEP_ID               Slurm: names the job together with SLURM_JOB_ID.
//   PMI_RANK                    PMI (MPICH, Intel MPI): as RANK.
//   PMI_JOBID                   PMI: names the job.
//   PMIX_RANK                   PMIx: as RANK.
//   PMIX_NAMESPACE              PMIx: names the job.
//   TORCHELASTIC_RUN_ID         torchrun: names the job; its default `none` is left out.
#pragma once

#include <cstdint>

namespace dynamiccl {

struct Job {
  /// Hash of all variables that identify the job; 0: none is set.
  std::uint64_t id;
  std::uint32_t restart;
  std::int32_t world_rank;  // -1: unknown
};

/// Reads DYNAMICCL_JOB_ID, or else what Slurm, torchrun, Open MPI and PMIx set.
Job find_job() noexcept;

}  // namespace dynamiccl
