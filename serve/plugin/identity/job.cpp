// Jobs that must not share a coordinator differ in at least one of these variables: two jobs, two
// steps of one allocation, a restart by Slurm.
#include "identity/job.h"

#include <cstring>

#include "file.h"
#include "identity/environment.h"

namespace dynamiccl {
namespace {

/// The first of these variables that is set, or null.
template <std::size_t count>
const char* first_of(const char* const (&variables)[count]) noexcept {
  for (const char* variable : variables) {
    if (const char* value = value_of(variable)) return value;
  }
  return nullptr;
}

std::int32_t small_number(const char* text, std::int32_t fallback) noexcept {
  std::uint64_t number;
  return parse_number(text, &number) && number < 1U << 30 ? static_cast<std::int32_t>(number)
                                                          : fallback;
}

}  // namespace

Job find_job() noexcept {
  static constexpr const char* kRanks[] = {"RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID",
                                           "PMI_RANK", "PMIX_RANK"};
  // Not TORCHELASTIC_RESTART_COUNT: each agent counts the failures of its own processes. Nor is any
  // other number of torchrun's equal on all nodes and new in each round; a process that is left of
  // the former round cannot be taken for one of this, since ids of communicators are drawn anew.
  static constexpr const char* kRestarts[] = {"DYNAMICCL_RESTART", "SLURM_RESTART_COUNT"};
  static constexpr const char* kNames[] = {
      "SLURM_JOB_ID", "SLURM_STEP_ID",       "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid",
      "PMI_JOBID",    "TORCHELASTIC_RUN_ID", "MASTER_ADDR",    "MASTER_PORT"};
  Job job = {0, 0, small_number(first_of(kRanks), -1)};
  job.restart = static_cast<std::uint32_t>(small_number(first_of(kRestarts), 0));
  const auto mix = [&job](const char* text) {
    // Includes the terminating zero, so that "1","2" differs from "12".
    job.id = (job.id ^ fnv1a(reinterpret_cast<const std::uint8_t*>(text), std::strlen(text) + 1)) *
             kFnvPrime;
    if (job.id == 0) job.id = 1;
  };
  if (const char* name = value_of("DYNAMICCL_JOB_ID")) {
    mix(name);
    // `dynamiccl-run srun ... &`, twice in one allocation, has no step id yet.
    const char* allocation = value_of("SLURM_JOB_ID");
    const char* step = value_of("SLURM_STEP_ID");
    if (allocation != nullptr && step != nullptr && std::strcmp(name, allocation) == 0) mix(step);
    return job;
  }
  for (const char* variable : kNames) {
    const char* value = value_of(variable);
    // torchrun's default id, which is the same in every job.
    if (value == nullptr || std::strcmp(value, "none") == 0) continue;
    mix(variable);
    mix(value);
  }
  return job;
}

}  // namespace dynamiccl
