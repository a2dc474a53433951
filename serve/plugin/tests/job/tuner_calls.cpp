// NCCL's wrappers of the older structs (`src/plugin/tuner/tuner_v*.cc`), in our own words.
#include "tests/job/tuner_calls.h"

#include <dlfcn.h>

#include <array>
#include <stdexcept>

#include "vocabulary.h"

using namespace dynamiccl;

namespace {

// As large as ncclTunerConstants_v5_t; its figures mean nothing here.
using Constants = std::array<double, 144>;

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
                                 reinterpret_cast<ncclTunerConstants_v5_t*>(constants.data()));
  if (constants != before) {
    throw std::logic_error("the plugin changed NCCL's constants");
  }
  return result;
}

TunerAnswer TunerCalls::ask(void* context, const TunerQuestion& question,
                            std::vector<float> costs) const {
  TunerAnswer answer = {ncclSuccess, std::move(costs), 0};
  const int num_algorithms = release_.num_algorithms;
  float** table = reinterpret_cast<float**>(answer.costs.data());
  if (version_ == 3) {
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
