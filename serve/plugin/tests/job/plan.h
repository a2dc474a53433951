// What the job does, the same on every rank: which communicators there are, and which collectives
// each one runs. All of it is hashed from the options, so that nothing need be sent.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <set>
#include <vector>

#include "identity/ids.h"
#include "tests/job/options.h"
#include "vocabulary.h"

/// One collective that the job calls.
struct Task {
  int collective;
  std::size_t size_bytes;  // as NCCL counts them for a tuner
  bool is_bf16;            // or float32
};

inline std::uint64_t mixed(std::uint64_t left, std::uint64_t right) {
  std::uint64_t x = left * 0x9e3779b97f4a7c15 + right + 0x7f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

struct Plan {
  const Options& options;

  /// Ranks of the communicator of `slot` that `rank` is in, in order. Slot 0 is the world; the
  /// others are, in turn, tensor, data and pipeline groups and further worlds.
  std::vector<int> members(int slot, int rank) const {
    std::vector<int> ranks;
    for (int other = 0; other < options["ranks"]; ++other) {
      if (color(slot, other) == color(slot, rank)) ranks.push_back(other);
    }
    return ranks;
  }

  /// The world ranks stand on nodes in blocks.
  int num_nodes(const std::vector<int>& members) const {
    std::set<int> nodes;
    for (const int rank : members) nodes.insert(rank / (options["ranks"] / options["nodes"]));
    return static_cast<int>(nodes.size());
  }

  /// One of its own, as ncclCommSplit gives. With `shrinks` slot 1 is a shrink of the world by each
  /// of its groups at once, which have one id, generation after generation (a shrink that is tried
  /// again), and the others are splits of that, without a colour.
  std::uint64_t comm_id(int slot, int rank, int generation) const {
    const std::uint64_t world = mixed(mixed(options["seed"], options["job"]), 1);
    if (slot == 0 && generation == 0) return world;
    const std::uint64_t number = static_cast<std::uint64_t>(slot) + 1000U * generation;
    if (options["shrinks"] == 0 || slot == 0) return mixed(mixed(world, number), color(slot, rank));
    const std::uint64_t shrunk = dynamiccl::id_of_shrunk(world);
    return slot == 1 ? shrunk : mixed(shrunk, number);
  }

  /// The collectives of one group.
  std::vector<Task> group(int slot, int index) const {
    using namespace dynamiccl;
    constexpr int kCommonSizes = 24;  // a training job calls few sizes, again and again
    constexpr int kUsual[] = {kAllReduce,     kAllReduce,     kAllReduce, kAllGather, kAllGather,
                              kReduceScatter, kReduceScatter, kBroadcast, kReduce,    kAllReduce};
    const std::uint64_t seed = mixed(mixed(options["seed"], slot), index % options["pattern"]);
    const bool several = options["max-group"] > 1 && seed % 5 == 0;
    const std::uint64_t count = several ? 2 + mixed(seed, 1) % (options["max-group"] - 1) : 1;
    std::vector<Task> tasks;
    for (std::uint64_t i = 0; i < count; ++i) {
      const std::uint64_t draw = mixed(seed, 100 + i);
      const double log2_size =
          8 + 22 * static_cast<double>(draw / 16 % kCommonSizes) / kCommonSizes;
      const std::size_t size_bytes = static_cast<std::size_t>(std::exp2(log2_size)) / 256 * 256;
      tasks.push_back({kUsual[draw % 10], size_bytes, draw / 4096 % 2 == 1});
    }
    return tasks;
  }

 private:
  int color(int slot, int rank) const {
    // Ranks per tensor group: the largest power of two up to 8 that leaves several groups.
    int tensor = 2;
    while (tensor < 8 && 4 * tensor <= options["ranks"]) tensor *= 2;
    if (options["ranks"] < 4) return 0;
    // The world, neighbours, one of each tensor group, pipeline stages.
    const int colors[] = {0, rank / tensor, rank % tensor, rank % 2};
    return colors[options["shrinks"] != 0 && slot > 0 ? 1 : slot % 4];
  }
};
