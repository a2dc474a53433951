// Descriptors are filled as `src/plugin/profiler.cc` does, unused fields zero.
#include "tests/job/profiler_calls.h"

#include <dlfcn.h>

#include <string>

#include "nccl/profiler_abi.h"

namespace {

constexpr const char* kCollectives[] = {"Broadcast", "Reduce", "AllGather", "ReduceScatter",
                                        "AllReduce"};
constexpr const char* kAlgorithms[] = {
    "TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT"};
constexpr const char* kProtocols[] = {"LL", "LL128", "SIMPLE"};

}  // namespace

const char* collective_name(int collective) { return kCollectives[collective]; }
const char* algorithm_name(int algorithm) { return kAlgorithms[algorithm]; }
const char* protocol_name(int protocol) { return kProtocols[protocol]; }

ProfilerCalls::ProfilerCalls(void* library, const Release& release) {
  for (const int version : release.profiler_versions) {
    symbol_ = dlsym(library, ("ncclProfiler_v" + std::to_string(version)).c_str());
    if (symbol_ != nullptr) {
      version_ = version;
      return;
    }
  }
}

ncclResult_t ProfilerCalls::init(void** context, std::uint64_t comm_id, int* mask, int num_nodes,
                                 int num_ranks, int rank, ncclDebugLogger_t logger) const {
  if (version_ == 4) {
    return as<ncclProfiler_v4_t>()->init(context, mask, nullptr, comm_id, num_nodes, num_ranks,
                                         rank, logger);
  }
  return as<ncclProfiler_v5_t>()->init(context, comm_id, mask, nullptr, num_nodes, num_ranks, rank,
                                       logger);
}

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

void* ProfilerCalls::start_group_api(void* context, bool captured) const {
  void* handle = nullptr;
  ncclProfilerEventDescr_v5_t descriptor = {};
  descriptor.type = ncclProfileGroupApi;
  descriptor.groupApi.graphCaptured = captured;
  descriptor.groupApi.groupDepth = 1;
  as<ncclProfiler_v5_t>()->startEvent(context, &handle, &descriptor);
  return handle;
}

void* ProfilerCalls::start_coll_api(void* context, void* group_api, int collective,
                                    std::size_t count, const char* datatype, bool captured) const {
  void* handle = nullptr;
  ncclProfilerEventDescr_v5_t descriptor = {};
  descriptor.type = ncclProfileCollApi;
  descriptor.parentObj = group_api;
  descriptor.collApi.func = collective_name(collective);
  descriptor.collApi.count = count;
  descriptor.collApi.datatype = datatype;
  descriptor.collApi.graphCaptured = captured;
  as<ncclProfiler_v5_t>()->startEvent(context, &handle, &descriptor);
  return handle;
}

void* ProfilerCalls::start_p2p_api(void* context, void* group_api) const {
  void* handle = nullptr;
  ncclProfilerEventDescr_v5_t descriptor = {};
  descriptor.type = ncclProfileP2pApi;
  descriptor.parentObj = group_api;
  descriptor.p2pApi.func = "Send";
  descriptor.p2pApi.count = 1024;
  descriptor.p2pApi.datatype = "ncclFloat32";
  as<ncclProfiler_v5_t>()->startEvent(context, &handle, &descriptor);
  return handle;
}

void* ProfilerCalls::start_kernel_launch(void* context, void* group_api) const {
  void* handle = nullptr;
  ncclProfilerEventDescr_v5_t descriptor = {};
  descriptor.type = ncclProfileKernelLaunch;
  descriptor.parentObj = group_api;
  as<ncclProfiler_v5_t>()->startEvent(context, &handle, &descriptor);
  return handle;
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
