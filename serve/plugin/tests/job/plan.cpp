// Draws by hashing rather than from a generator, so that any call can be asked for by itself.
#include "tests/job/plan.h"

#include <algorithm>
#include <cmath>
#include <set>

using namespace dynamiccl;

namespace {

constexpr int kCommonSizes = 24;  // a training job calls few sizes, again and again

std::uint64_t mixed(std::uint64_t left, std::uint64_t right) {
  std::uint64_t x = left * 0x9e3779b97f4a7c15 + right + 0x7f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

/// A child's id (2.30.7 `src/init.cc:1875-1880`, `src/include/bitops.h:502`).
std::uint64_t child_id(std::uint64_t parent, std::uint32_t number, std::uint32_t color) {
  std::uint64_t a = 1, b = 1;
  const auto eat = [&](std::uint64_t value, std::uint64_t size) {
    a = (a ^ size) + b;
    b ^= a;
    a = (a ^ a >> 31) * 0x9de62bbc8cef3ce3;
    b = (b ^ b >> 32) * 0x485cd6311b599e79;
    a += value;
  };
  eat(parent, 8);
  eat(number, 4);
  eat(color, 4);
  a = (a ^ a >> 31) * 0xbac3bd562846de6b + b;
  return (a ^ a >> 32) * 0x995a187a14e7b445;
}

/// Ranks per tensor group: the largest power of two up to 8 that leaves several groups.
int tensor_size(int num_ranks) {
  int size = 2;
  while (size < 8 && 4 * size <= num_ranks) size *= 2;
  return std::min(size, num_ranks);
}

}  // namespace

Plan::Plan(const Options& options, std::uint64_t job_id) : options_(options), job_id_(job_id) {}

int Plan::color(int slot, int rank) const {
  const int tensor = tensor_size(options_.num_ranks);
  if (options_.num_ranks < 4) return 0;
  if (options_.shrinks && slot > 0) slot = 1;
  switch (slot % 4) {
    case 1:
      return rank / tensor;  // tensor: neighbours
    case 2:
      return rank % tensor;  // data: one of each tensor group
    case 3:
      return rank % 2;  // pipeline stages
    default:
      return 0;  // the world
  }
}

std::vector<int> Plan::members(int slot, int rank) const {
  std::vector<int> ranks;
  for (int other = 0; other < options_.num_ranks; ++other) {
    if (color(slot, other) == color(slot, rank)) ranks.push_back(other);
  }
  return ranks;
}

std::uint64_t Plan::comm_id(int slot, int rank, std::uint32_t generation) const {
  const std::uint64_t world = mixed(mixed(options_.seed, job_id_), 1);
  if (slot == 0 && generation == 0) return world;
  const auto number = static_cast<std::uint32_t>(slot) + 1000U * generation;
  const std::uint64_t shrunk = child_id(world, 0, 0);  // a shrink has no number and no colour
  if (options_.shrinks && slot == 1) return shrunk;
  if (options_.shrinks && slot > 1) return child_id(shrunk, number, 0);
  return child_id(world, number, static_cast<std::uint32_t>(color(slot, rank)));
}

int Plan::num_nodes(const std::vector<int>& members) const {
  std::set<int> nodes;
  for (const int rank : members) {
    nodes.insert(rank / (options_.num_ranks / options_.num_nodes));
  }
  return static_cast<int>(nodes.size());
}

std::vector<Task> Plan::group(int slot, std::uint64_t index) const {
  const std::uint64_t step = index % static_cast<std::uint64_t>(options_.pattern);
  const std::uint64_t seed = mixed(mixed(options_.seed, static_cast<std::uint64_t>(slot)), step);
  const bool several = options_.max_group > 1 && seed % 5 == 0;
  const std::uint64_t count =
      several ? 2 + mixed(seed, 1) % static_cast<std::uint64_t>(options_.max_group - 1) : 1;
  std::vector<Task> tasks;
  for (std::uint64_t i = 0; i < count; ++i) {
    const std::uint64_t draw = mixed(seed, 100 + i);
    constexpr int kUsual[] = {kAllReduce,     kAllReduce,     kAllReduce, kAllGather, kAllGather,
                              kReduceScatter, kReduceScatter, kBroadcast, kReduce,    kAllReduce};
    Task task;
    task.collective = kUsual[draw % 10];
    const auto which = static_cast<double>(draw / 16 % kCommonSizes);
    const double log2_size = 8 + 22 * which / kCommonSizes;
    task.size_bytes = static_cast<std::size_t>(std::exp2(log2_size)) / 256 * 256;
    task.datatype = static_cast<Datatype>(draw / 4096 % 8 == 0 ? 2 : draw / 4096 % 2);
    tasks.push_back(task);
  }
  return tasks;
}
