// NCCL's wrappers of the older structs (`src/plugin/tuner/tuner_v*.cc`), in our own words.
#include "tests/job/tuner_calls.h"

#include <dlfcn.h>

#include <cstring>
#include <stdexcept>

#include "vocabulary.h"

using namespace dynamiccl;

namespace {

// The layout of ncclTunerConstants_v5_t; its figures mean nothing here, but the plugin may look.
struct Constants {
  double base_latencies[7][3];
  double hw_latencies[3][7][3];
  double bandwidths[5][4][3];
};

}  // namespace

TunerCalls::TunerCalls(void* library, const Release& release) : release_(release) {
  for (const int version : release.tuner_versions) {
    symbol_ = dlsym(library, ("ncclTunerPlugin_v" + std::to_string(version)).c_str());
    if (symbol_ != nullptr) {
      version_ = version;
      return;
    }
  }
}

std::string TunerCalls::name() const { return version_ > 0 ? as<ncclTuner_v2_t>()->name : ""; }

ncclResult_t TunerCalls::init(void** context, std::uint64_t comm_id, int num_ranks, int num_nodes,
                              ncclDebugLogger_t logger) const {
  const auto ranks = static_cast<std::size_t>(num_ranks);
  const auto nodes = static_cast<std::size_t>(num_nodes);
  if (version_ <= 4) return as<ncclTuner_v2_t>()->init(ranks, nodes, logger, context);
  const int per_node = num_ranks / num_nodes;
  ncclNvlDomainInfo_v5_t domains = {num_nodes, per_node, (num_ranks + num_nodes - 1) / num_nodes};
  Constants constants = {};
  const Constants before = constants;
  const ncclResult_t result =
      as<ncclTuner_v5_t>()->init(context, comm_id, ranks, nodes, logger, &domains,
                                 reinterpret_cast<ncclTunerConstants_v5_t*>(&constants));
  if (std::memcmp(&constants, &before, sizeof before) != 0) {
    throw std::logic_error("the plugin changed NCCL's constants");
  }
  return result;
}

TunerAnswer TunerCalls::ask(void* context, const TunerQuestion& question,
                            std::vector<float> costs) const {
  TunerAnswer answer = {ncclSuccess, std::move(costs), 0, -1, -1};
  const int num_algorithms = release_.num_algorithms;
  float** table = reinterpret_cast<float**>(answer.costs.data());
  if (version_ == 2) {
    answer.result = as<ncclTuner_v2_t>()->getCollInfo(
        context, question.collective, question.size_bytes, question.collnet_support,
        question.nvls_support, question.num_pipe_ops, &answer.algorithm, &answer.protocol,
        &answer.num_channels);
    const bool chosen = answer.algorithm >= 0 && answer.protocol >= 0;
    if (!release_.asks_twice && chosen) {  // 2.22 on: only where the cell is there
      float& cell =
          answer
              .costs[static_cast<std::size_t>(answer.algorithm * kNumProtocols + answer.protocol)];
      if (cell != kCostIgnore) cell = 0.0F;
    }
  } else if (version_ == 3) {
    answer.result = as<ncclTuner_v3_t>()->getCollInfo(
        context, question.collective, question.size_bytes, question.num_pipe_ops, table,
        num_algorithms, kNumProtocols, &answer.num_channels);
  } else {
    // v5 and v6 have it at the same place.
    answer.result = as<ncclTuner_v4_t>()->getCollInfo(
        context, question.collective, question.size_bytes, question.num_pipe_ops, table,
        num_algorithms, kNumProtocols, question.reg_buff, &answer.num_channels);
  }
  return answer;
}

bool TunerCalls::has_chunks() const {
  return version_ == 6 && as<ncclTuner_v6_t>()->getChunkSize != nullptr;
}

ncclResult_t TunerCalls::chunk(void* context, int collective, std::size_t size_bytes, int algorithm,
                               int protocol, int num_channels, std::size_t* chunk_bytes) const {
  return as<ncclTuner_v6_t>()->getChunkSize(context, collective, size_bytes, algorithm, protocol,
                                            num_channels, chunk_bytes);
}

ncclResult_t TunerCalls::finalize(void* context) const {
  return as<ncclTuner_v2_t>()->destroy(context);  // at one place in all versions
}
