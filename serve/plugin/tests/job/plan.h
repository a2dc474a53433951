// What the job does, the same on every rank: which communicators there are, and which collectives
// each one runs. Everything follows from the options, so that nothing need be sent.
#pragma once

#include <cstdint>
#include <vector>

#include "tests/job/fake_nccl.h"
#include "tests/job/options.h"

class Plan {
 public:
  /// `job_id` sets two jobs of one seed apart, as NCCL's unique ids do.
  Plan(const Options& options, std::uint64_t job_id);

  /// Ranks of the communicator of `slot` that `rank` is in, in order. Slot 0 is the world; the
  /// others are, in turn, tensor, data and pipeline groups and further worlds.
  std::vector<int> members(int slot, int rank) const;

  /// As ncclCommSplit derives it: from the world's, how many there were before, and the colour.
  /// With `shrinks` slot 1 is a shrink of the world by each of its groups at once, generation after
  /// generation (a shrink that is tried again), and the others are splits of that.
  std::uint64_t comm_id(int slot, int rank, std::uint32_t generation) const;

  /// The world ranks stand on nodes in blocks.
  int num_nodes(const std::vector<int>& members) const;

  /// The collectives of one group.
  std::vector<Task> group(int slot, std::uint64_t index) const;

 private:
  int color(int slot, int rank) const;

  const Options& options_;
  const std::uint64_t job_id_;
};
