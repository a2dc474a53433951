// The releases of NCCL, read in their sources (`src/misc/tuner.cc`, `src/plugin/*.cc`,
// `src/init.cc`), and their wrappers of the older structs, in our own words.
#include "tests/job/plugin_calls.h"

#include <dlfcn.h>

#include <array>
#include <stdexcept>

#include "nccl/profiler_abi.h"
#include "vocabulary.h"

using namespace dynamiccl;

namespace {

const std::vector<Release>& releases() {
  static const std::vector<Release> all = {
      {"2.24", 22403, {4}, {}, 7, false, false},
      {"2.25", 22501, {4}, {}, 7, false, false},
      {"2.26", 22606, {4}, {}, 7, false, false},
      {"2.27", 22707, {4}, {4}, 7, false, false},
      {"2.28", 22809, {5, 4}, {5, 4}, 7, true, false},
      {"2.29", 22907, {5, 4}, {6, 5, 4}, 7, true, true},
      {"2.30", 23007, {6, 5, 4}, {6, 5, 4}, 7, true, true},
      // Stands for a release that was not read.
      {"2.31", 23102, {6, 5, 4}, {6, 5, 4}, 7, true, true},
  };
  return all;
}

constexpr const char* kCollectives[] = {"Broadcast", "Reduce", "AllGather", "ReduceScatter",
                                        "AllReduce"};
constexpr const char* kAlgorithms[] = {
    "TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT"};
constexpr const char* kProtocols[] = {"LL", "LL128", "SIMPLE"};

// As large as ncclTunerConstants_v5_t; its figures mean nothing here.
using Constants = std::array<double, 144>;

}  // namespace

const Release& release_named(const std::string& name) {
  std::string choices;
  for (const Release& release : releases()) {
    if (release.name == name) return release;
    choices += (choices.empty() ? "" : ", ") + release.name;
  }
  throw std::invalid_argument("no release '" + name + "'; choose from " + choices);
}

Symbol::Symbol(void* library, const std::string& prefix, const std::vector<int>& versions) {
  for (const int version : versions) {
    symbol_ = dlsym(library, (prefix + std::to_string(version)).c_str());
    if (symbol_ == nullptr) continue;
    version_ = version;
    return;
  }
}

TunerCalls::TunerCalls(void* library, const Release& release)
    : Symbol(library, "ncclTunerPlugin_v", release.tuner_versions), release_(release) {}

ncclResult_t TunerCalls::init(void** context, std::uint64_t comm_id, int num_ranks, int num_nodes,
                              ncclDebugLogger_t logger) const {
  const auto ranks = static_cast<std::size_t>(num_ranks);
  const auto nodes = static_cast<std::size_t>(num_nodes);
  if (version_ == 4) return as<ncclTuner_v4_t>()->init(ranks, nodes, logger, context);
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
  // v5 and v6 have it at the same place.
  answer.result = as<ncclTuner_v4_t>()->getCollInfo(
      context, question.collective, question.size_bytes, question.num_pipe_ops, table,
      num_algorithms, kNumProtocols, question.reg_buff, &answer.num_channels);
  return answer;
}

ncclResult_t TunerCalls::finalize(void* context) const {
  return as<ncclTuner_v4_t>()->destroy(context);  // at one place in all versions
}

const char* collective_name(int collective) { return kCollectives[collective]; }
const char* algorithm_name(int algorithm) { return kAlgorithms[algorithm]; }
const char* protocol_name(int protocol) { return kProtocols[protocol]; }

ProfilerCalls::ProfilerCalls(void* library, const Release& release)
    : Symbol(library, "ncclProfiler_v", release.profiler_versions) {}

ncclResult_t ProfilerCalls::init(void** context, std::uint64_t comm_id, int* mask, int num_nodes,
                                 int num_ranks, int rank, ncclDebugLogger_t logger) const {
  if (version_ == 4) {
    return as<ncclProfiler_v4_t>()->init(context, mask, nullptr, comm_id, num_nodes, num_ranks,
                                         rank, logger);
  }
  return as<ncclProfiler_v5_t>()->init(context, comm_id, mask, nullptr, num_nodes, num_ranks, rank,
                                       logger);
}

// Descriptors are filled as `src/plugin/profiler.cc` does, unused fields zero.

/// `fill` gets the descriptor of the version: v4's type differs from that of v5 and v6.
template <typename Fill>
void* ProfilerCalls::start(void* context, std::uint64_t type, void* parent, int rank,
                           const Fill& fill) const {
  void* handle = nullptr;
  const auto run = [&](auto* profiler, auto descriptor) {
    descriptor.type = static_cast<decltype(descriptor.type)>(type);
    descriptor.parentObj = parent;
    descriptor.rank = rank;
    fill(&descriptor);
    profiler->startEvent(context, &handle, &descriptor);
  };
  if (version_ == 4) {
    run(as<ncclProfiler_v4_t>(), ncclProfilerEventDescr_v4_t{});
  } else {
    run(as<ncclProfiler_v5_t>(), ncclProfilerEventDescr_v5_t{});
  }
  return handle;
}

/// Of those that older versions have not.
template <typename Fill>
void* ProfilerCalls::start_v5(void* context, std::uint64_t type, void* parent,
                              const Fill& fill) const {
  void* handle = nullptr;
  ncclProfilerEventDescr_v5_t descriptor = {};
  descriptor.type = type;
  descriptor.parentObj = parent;
  fill(&descriptor);
  as<ncclProfiler_v5_t>()->startEvent(context, &handle, &descriptor);
  return handle;
}

void* ProfilerCalls::start_group_api(void* context, bool captured) const {
  return start_v5(context, ncclProfileGroupApi, nullptr, [&](auto* descriptor) {
    descriptor->groupApi.graphCaptured = captured;
    descriptor->groupApi.groupDepth = 1;
  });
}

void* ProfilerCalls::start_coll_api(void* context, void* group_api, int collective,
                                    std::size_t count, const char* datatype, bool captured) const {
  return start_v5(context, ncclProfileCollApi, group_api, [&](auto* descriptor) {
    descriptor->collApi.func = collective_name(collective);
    descriptor->collApi.count = count;
    descriptor->collApi.datatype = datatype;
    descriptor->collApi.graphCaptured = captured;
  });
}

void* ProfilerCalls::start_p2p_api(void* context, void* group_api) const {
  return start_v5(context, ncclProfileP2pApi, group_api, [](auto*) {});
}

void* ProfilerCalls::start_kernel_launch(void* context, void* group_api) const {
  return start_v5(context, ncclProfileKernelLaunch, group_api, [](auto*) {});
}

void* ProfilerCalls::start_group(void* context) const {
  return start(context, ncclProfileGroup, nullptr, 0, [](auto*) {});
}

void* ProfilerCalls::start_collective(void* context, void* parent,
                                      const CollectiveEvent& event) const {
  return start(context, ncclProfileColl, parent, event.rank, [&](auto* descriptor) {
    descriptor->coll.seqNumber = event.sequence;
    descriptor->coll.func = collective_name(event.collective);
    descriptor->coll.count = event.count;
    descriptor->coll.datatype = event.datatype;
    descriptor->coll.nChannels = static_cast<std::uint8_t>(event.num_channels);
    descriptor->coll.nWarps = static_cast<std::uint8_t>(event.num_warps);
    descriptor->coll.algo = algorithm_name(event.algorithm);
    descriptor->coll.proto = protocol_name(event.protocol);
  });
}

void* ProfilerCalls::start_p2p(void* context, void* group, int rank) const {
  return start(context, ncclProfileP2p, group, rank, [](auto*) {});
}

void* ProfilerCalls::start_kernel(void* context, void* collective, int channel,
                                  std::uint64_t start_ns) const {
  return start(context, ncclProfileKernelCh, collective, 0, [&](auto* descriptor) {
    descriptor->kernelCh.channelId = static_cast<std::uint8_t>(channel);
    descriptor->kernelCh.pTimer = start_ns;
  });
}

void ProfilerCalls::stop_kernel(void* kernel, std::uint64_t stop_ns) const {
  if (kernel == nullptr) return;
  ncclProfilerEventStateArgs_v4_t arguments = {};
  arguments.kernelCh.pTimer = stop_ns;
  as<ncclProfiler_v4_t>()->recordEventState(kernel, ncclProfilerKernelChStop, &arguments);
  as<ncclProfiler_v4_t>()->stopEvent(kernel);
}

void ProfilerCalls::record(void* handle, int state) const {
  if (handle != nullptr) as<ncclProfiler_v5_t>()->recordEventState(handle, state, nullptr);
}

void ProfilerCalls::stop(void* handle) const {
  if (handle == nullptr) return;
  as<ncclProfiler_v4_t>()->stopEvent(handle);  // at one place in all versions
}

ncclResult_t ProfilerCalls::finalize(void* context) const {
  return as<ncclProfiler_v4_t>()->finalize(context);
}
