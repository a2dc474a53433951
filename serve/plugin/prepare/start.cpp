// What launchers say: torchrun (RANK, LOCAL_WORLD_SIZE, TORCHELASTIC_RUN_ID), Open MPI (OMPI_*),
// Slurm (SLURM_*), PMI and PMIx, Kubernetes (JOB_COMPLETION_INDEX: one rank a pod), and
//
//   DYNAMICCL_JOB_ID   names the job; the same on all its ranks. Default: what the launcher sets.
//   DYNAMICCL_RESTART  which attempt of the job this is. Default: Slurm's count.
//   MASTER_ADDR        host of rank 0.
//   MASTER_PORT        names the job, beside others.
#include <cstdlib>
#include <initializer_list>

#include "file.h"
#include "platform/clock.h"
#include "prepare/prepare.h"

namespace dynamiccl {
namespace {

/// The first of some values that is not empty.
std::string first_of(std::initializer_list<std::string> values) {
  for (const std::string& one : values) {
    if (!one.empty()) return one;
  }
  return "";
}

/// The first host of a Slurm list such as n[03-05,9],m1. A container has no scontrol to ask.
std::string first_of_list(const std::string& list) {
  std::string name;
  bool is_inside = false, has_number = false;
  for (const char c : list) {
    if (c == '[' || c == ']') {
      is_inside = c == '[';
      has_number = false;
    } else if (is_inside) {
      has_number |= c == ',' || c == '-';
      if (!has_number) name += c;
    } else if (c == ',') {
      break;
    } else {
      name += c;
    }
  }
  return name;
}

struct Rank {
  std::string number, size, local_size;  // empty: not told
};

/// As which rank a launcher started this process; the innermost launcher comes first.
Rank find_rank(bool by_srun) {
  const bool is_first = value("SLURM_NODEID") == "0" && value("SLURM_LOCALID") == "0";
  const Rank told[] = {
      {value("RANK"), value("WORLD_SIZE"), value("LOCAL_WORLD_SIZE")},
      {value("OMPI_COMM_WORLD_RANK"), value("OMPI_COMM_WORLD_SIZE"),
       value("OMPI_COMM_WORLD_LOCAL_SIZE")},
      {by_srun ? (is_first ? "0" : "1") : "", "", ""},
      {value("PMI_RANK"), value("PMI_SIZE"), value("MPI_LOCALNRANKS")},
      {value("PMIX_RANK"), "", ""},
      {value("JOB_COMPLETION_INDEX"), "", ""},
  };
  for (const Rank& rank : told) {
    if (!rank.number.empty()) return rank;
  }
  return {};
}

Hosts find_hosts(const Rank& rank, bool by_srun) {
  const auto one_if = [](bool is_one) { return is_one ? Hosts::kOne : Hosts::kSeveral; };
  if (!rank.size.empty() && !rank.local_size.empty()) return one_if(rank.size == rank.local_size);
  const std::string nodes =
      first_of({by_srun ? value("SLURM_STEP_NUM_NODES") : "", value("SLURM_JOB_NUM_NODES")});
  if (!nodes.empty()) return one_if(nodes == "1" && value("SLURM_HET_SIZE").empty());
  return rank.number.empty() ? Hosts::kUnknown : Hosts::kSeveral;
}

}  // namespace

std::string value(const char* variable) {
  const char* text = std::getenv(variable);
  return text != nullptr ? text : "";
}

Start find_start() {
  Start start;
  // A script, or the shell of salloc, is a step whose number has ten digits. And orted is no rank.
  const std::string step = value("SLURM_STEP_ID");
  const bool by_srun = !step.empty() && step.size() < 10 && value("OMPI_COMM_WORLD_RANK").empty();
  const Rank rank = find_rank(by_srun);
  start.is_rank = !rank.number.empty();
  start.hosts = find_hosts(rank, by_srun);
  const std::string list =
      first_of({by_srun ? value("SLURM_STEP_NODELIST") : "", value("SLURM_JOB_NODELIST")});
  start.host = first_of({value("MASTER_ADDR"), first_of_list(list)});
  if (start.host.empty() && start.hosts != Hosts::kSeveral) start.host = "127.0.0.1";
  start.is_first = !start.is_rank || rank.number == "0";

  // Not TORCHELASTIC_RESTART_COUNT: each agent counts the failures of its own processes. Not
  // MASTER_ADDR: rank 0 may know its host by another name. Two jobs of one name are no harm: the
  // ids of their communicators are drawn.
  Words names = {value("DYNAMICCL_JOB_ID")};
  const bool is_torch = !value("TORCHELASTIC_RUN_ID").empty();
  const bool has_step = by_srun && !is_torch;  // of agents each may have a step of its own
  if (names[0].empty()) {
    names = {value("SLURM_JOB_ID"), has_step ? step : "", value("MASTER_PORT")};
    if (value("TORCHELASTIC_RUN_ID") != "none") names.push_back(value("TORCHELASTIC_RUN_ID"));
    for (const char* name : {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID"}) {
      if (!is_torch) names.push_back(value(name));
    }
  } else if (has_step && names[0] == value("SLURM_JOB_ID")) {
    names.push_back(step);  // `dynamiccl-run srun ... &`, twice
  }
  for (const std::string& name : names) {
    if (!name.empty()) start.name += (start.name.empty() ? "" : ".") + name;
  }
  if (start.name.empty() && !start.is_rank) start.name = std::to_string(draw());
  const std::string attempt =
      start.name + '\n' + first_of({value("DYNAMICCL_RESTART"), value("SLURM_RESTART_COUNT")});
  start.id = fnv1a(reinterpret_cast<const std::uint8_t*>(attempt.data()), attempt.size()) | 1;
  return start;
}

}  // namespace dynamiccl
