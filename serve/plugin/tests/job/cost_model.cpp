// The figures are round ones; what matters is that every rank computes the same ones.
#include "tests/job/cost_model.h"

#include <algorithm>
#include <cmath>

using namespace dynamiccl;

namespace {

struct Line {
  double latency_us;
  double gbytes_per_s;
};

constexpr Line kLines[kNumAlgorithms][kNumProtocols] = {
    {{7, 20}, {14, 70}, {20, 95}},   // Tree
    {{9, 25}, {16, 90}, {28, 130}},  // Ring
    {{0, 0}, {0, 0}, {30, 110}},     // CollNetDirect
    {{0, 0}, {0, 0}, {33, 90}},      // CollNetChain
    {{0, 0}, {0, 0}, {25, 170}},     // NVLS
    {{0, 0}, {0, 0}, {31, 150}},     // NVLSTree
    {{0, 0}, {0, 0}, {18, 60}},      // PAT
};

}  // namespace

bool CostModel::is_collnet(int algorithm) const {
  return algorithm == kCollNetDirect || algorithm == kCollNetChain ||
         (algorithm == kNVLS && num_nodes > 1);
}

std::vector<float> CostModel::costs(int collective, std::size_t size_bytes, int num_pipe_ops,
                                    bool fp8) const {
  std::vector<float> costs(static_cast<std::size_t>(num_algorithms) * kNumProtocols, kCostIgnore);
  for (int a = 0; a < num_algorithms; ++a) {
    if (a == kNVLSTree && num_nodes == 1) continue;
    if (a == kNVLS && num_nodes > 1 && num_nodes < 4) continue;  // CollNet from 4 nodes on
    if ((a == kCollNetDirect || a == kCollNetChain) && num_nodes < 4) continue;
    if (a == kPAT && num_nodes != num_ranks) continue;
    for (int p = 0; p < kNumProtocols; ++p) {
      if ((kValid[collective][a] >> p & 1) == 0) continue;
      const Line& line = kLines[a][p];
      const double hops = a == kRing ? num_ranks - 1 : 1 + std::log2(num_ranks);
      double cost_us = line.latency_us * num_pipe_ops + 0.7 * hops * num_nodes +
                       static_cast<double>(size_bytes) / (1000 * line.gbytes_per_s);
      if (fp8 && a == kRing && num_ranks > 8) cost_us *= 1024;
      costs[static_cast<std::size_t>(a * kNumProtocols + p)] = static_cast<float>(cost_us);
    }
  }
  return costs;
}

int CostModel::cheapest(const std::vector<float>& costs) {
  int best = -1;
  for (std::size_t cell = 0; cell < costs.size(); ++cell) {
    if (costs[cell] == kCostIgnore || !(costs[cell] >= 0.0F)) continue;
    if (best < 0 || costs[cell] < costs[static_cast<std::size_t>(best)]) {
      best = static_cast<int>(cell);
    }
  }
  return best;
}

int CostModel::default_channels(int algorithm, int protocol, std::size_t size_bytes) const {
  if (algorithm == kNVLS || algorithm == kNVLSTree) return num_nvls_channels();
  const std::size_t per_channel = protocol == kLL ? 1 << 12 : 1 << 15;
  int channels = num_channels();
  while (channels >= 2 && size_bytes < static_cast<std::size_t>(channels) * per_channel) --channels;
  return channels;
}

int CostModel::used_channels(int collective, int algorithm, int protocol, std::size_t size_bytes,
                             int asked) const {
  if (is_collnet(algorithm)) return asked;
  const bool nvls = algorithm == kNVLS || algorithm == kNVLSTree;
  const int most = nvls ? num_nvls_channels() : num_channels();
  // One channel per 32 KiB of traffic at the least (`src/enqueue.cc`, scheduleCollTasksToPlan).
  const std::size_t traffic =
      size_bytes * (collective == kAllReduce ? 2 : 1) * (protocol == kLL ? 4 : 1);
  const auto enough = static_cast<int>(std::min<std::size_t>(1 + (traffic - 1) / 32768, 1 << 10));
  return std::max(1, std::min({asked, most, enough}));
}
