// Calls the built profiler as NCCL does: the order of events of each version, one event mask for
// the process, read when a call is made; kernels reported later and from elsewhere.
#pragma once

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "nccl/profiler_abi.h"
#include "tests/library.h"

struct ProfiledCall {
  const char* func = "AllReduce";
  std::size_t count = 1 << 20;
  const char* datatype = "ncclFloat32";
  std::uint8_t num_channels = 2;
  const char* algorithm = "RING";
  const char* protocol = "LL128";
  bool captured = false;
};

/// What NCCL remembers of a call between making and launching it.
struct Task {
  ProfiledCall call;
  int mask;
  void* api;
};

/// A collective on its stream. Its kernels are reported when the mask was wide.
struct Launched {
  void* context = nullptr;
  void* collective = nullptr;
  int num_kernels = 0;
};

class ProfilerDriver {
 public:
  ProfilerDriver(const char* path, int version)
      : version_(version), handle_(dlopen(path, RTLD_NOW | RTLD_LOCAL)) {
    if (handle_ == nullptr) {
      std::fprintf(stderr, "dlopen: %s\n", dlerror());
      std::exit(1);
    }
    const std::string symbol = "ncclProfiler_v" + std::to_string(version);
    v4_ = version == 4 ? static_cast<const ncclProfiler_v4_t*>(dlsym(handle_, symbol.c_str()))
                       : nullptr;
    v5_ = version != 4 ? static_cast<const ncclProfiler_v5_t*>(dlsym(handle_, symbol.c_str()))
                       : nullptr;
  }
  ~ProfilerDriver() { dlclose(handle_); }
  ProfilerDriver(const ProfilerDriver&) = delete;
  ProfilerDriver& operator=(const ProfilerDriver&) = delete;

  int mask() const { return __atomic_load_n(&mask_, __ATOMIC_RELAXED); }
  bool is_wide() const { return (mask() & ncclProfileKernelCh) != 0; }

  struct Comm {
    void* context = nullptr;
    std::uint64_t id = 0;
    int rank = 0;
    std::uint64_t sequence[dynamiccl::kNumCollectives] = {};
  };

  Comm init(std::uint64_t id, int rank = 0, int num_ranks = 8, int num_nodes = 1) {
    Comm comm;
    comm.id = id;
    comm.rank = rank;
    const ncclResult_t result =
        v4_ != nullptr
            ? v4_->init(&comm.context, &mask_, "name", id, num_nodes, num_ranks, rank, keep_line)
            : v5_->init(&comm.context, id, &mask_, "name", num_nodes, num_ranks, rank, keep_line);
    if (result != ncclSuccess) std::exit(1);
    return comm;
  }

  void finalize(Comm* comm) {
    if (comm->context != nullptr) {
      v4_ != nullptr ? v4_->finalize(comm->context) : v5_->finalize(comm->context);
    }
    comm->context = nullptr;
  }

  /// The API's part of a call: reads the mask, and from v5 on has events of its own.
  Task append(const Comm& comm, const ProfiledCall& call) {
    Task task = {call, mask(), nullptr};
    if (v4_ != nullptr || task.mask == 0) return task;
    ncclProfilerEventDescr_v5_t event = {};
    event.type = ncclProfileGroupApi;
    event.groupApi.graphCaptured = call.captured;
    void* group = nullptr;
    v5_->startEvent(comm.context, &group, &event);
    event = {};
    event.type = ncclProfileCollApi;
    event.parentObj = group;
    event.collApi.func = call.func;
    event.collApi.count = call.count;
    event.collApi.datatype = call.datatype;
    event.collApi.graphCaptured = call.captured;
    v5_->startEvent(comm.context, &task.api, &event);
    v5_->stopEvent(task.api);
    if (group != nullptr) v5_->stopEvent(group);
    return task;
  }

  /// Launches a plan of tasks. A captured one moves no sequence number unless KernelCh was asked
  /// for.
  std::vector<Launched> launch(Comm* comm, const std::vector<Task>& tasks) {
    std::vector<Launched> all;
    void* group = nullptr;
    if (!tasks.empty() && tasks[0].mask != 0) group = start_group(comm->context);
    for (const Task& task : tasks) {
      Launched launched;
      launched.context = comm->context;
      std::uint64_t& sequence = comm->sequence[index_of(task.call.func)];
      // 2.27 starts none without a group's handle.
      if ((task.mask & ncclProfileColl) != 0 && (v4_ == nullptr || group != nullptr)) {
        launched.collective = start_collective(*comm, task, sequence, group);
      }
      const bool is_wide = (task.mask & ncclProfileKernelCh) != 0;
      if (!task.call.captured || is_wide) ++sequence;
      if (is_wide) launched.num_kernels = task.call.num_channels;
      all.push_back(launched);
    }
    for (const Launched& launched : all) {
      if (launched.collective != nullptr) stop(launched.collective);
    }
    if (group != nullptr) stop(group);
    return all;
  }

  Launched call(Comm* comm, const ProfiledCall& call = {}) {
    return launch(comm, {append(*comm, call)})[0];
  }

  /// The proxy's part, for one channel.
  void* start_kernel(const Launched& launched, int channel, std::uint64_t gpu_ns) const {
    void* kernel = nullptr;
    if (v4_ != nullptr) {
      ncclProfilerEventDescr_v4_t event = {};
      event.type = ncclProfileKernelCh;
      event.parentObj = launched.collective;
      event.kernelCh = {static_cast<std::uint8_t>(channel), gpu_ns};
      v4_->startEvent(launched.context, &kernel, &event);
    } else {
      ncclProfilerEventDescr_v5_t event = {};
      event.type = ncclProfileKernelCh;
      event.parentObj = launched.collective;
      event.kernelCh = {static_cast<std::uint8_t>(channel), gpu_ns};
      v5_->startEvent(launched.context, &kernel, &event);
    }
    return kernel;
  }

  void stamp_kernel(void* kernel, std::uint64_t gpu_ns) const {
    if (kernel == nullptr) return;
    ncclProfilerEventStateArgs_v4_t arguments = {};
    arguments.kernelCh.pTimer = gpu_ns;
    v4_ != nullptr ? v4_->recordEventState(kernel, ncclProfilerKernelChStop, &arguments)
                   : v5_->recordEventState(kernel, ncclProfilerKernelChStop, &arguments);
  }

  void stop(void* event) const {
    if (event == nullptr) return;
    v4_ != nullptr ? v4_->stopEvent(event) : v5_->stopEvent(event);
  }

  void run_kernel(const Launched& launched, int channel, std::uint64_t start,
                  std::uint64_t stop_ns) const {
    void* kernel = start_kernel(launched, channel, start);
    stamp_kernel(kernel, stop_ns);
    stop(kernel);
  }

  /// All channels of a collective: channel c from begin + c to end + c.
  void run_kernels(const Launched& launched, std::uint64_t begin, std::uint64_t end) const {
    for (int channel = 0; channel < launched.num_kernels; ++channel) {
      const auto delay = static_cast<std::uint64_t>(channel);
      run_kernel(launched, channel, begin + delay, end + delay);
    }
  }

  void start_p2p(const Comm& comm) const {
    void* handle = nullptr;
    if (v4_ != nullptr) {
      ncclProfilerEventDescr_v4_t event = {};
      event.type = ncclProfileP2p;
      v4_->startEvent(comm.context, &handle, &event);
    } else {
      ncclProfilerEventDescr_v5_t event = {};
      event.type = ncclProfileP2p;
      v5_->startEvent(comm.context, &handle, &event);
    }
  }

 private:
  static int index_of(const char* func) {
    const std::string name = func;
    if (name == "AllReduce") return 4;
    if (name == "ReduceScatter") return 3;
    if (name == "AllGather") return 2;
    return name == "Reduce" ? 1 : 0;
  }

  void* start_group(void* context) const {
    void* group = nullptr;
    if (v4_ != nullptr) {
      ncclProfilerEventDescr_v4_t event = {};
      event.type = ncclProfileGroup;
      v4_->startEvent(context, &group, &event);
    } else {
      ncclProfilerEventDescr_v5_t event = {};
      event.type = ncclProfileGroup;
      v5_->startEvent(context, &group, &event);
    }
    return group;
  }

  void* start_collective(const Comm& comm, const Task& task, std::uint64_t sequence,
                         void* group) const {
    void* handle = nullptr;
    const ProfiledCall& call = task.call;
    const ncclProfilerColl_v4_t collective = {
        sequence,      call.func,         nullptr, nullptr,        call.count,   0,
        call.datatype, call.num_channels, 16,      call.algorithm, call.protocol};
    if (v4_ != nullptr) {
      ncclProfilerEventDescr_v4_t event = {};
      event.type = ncclProfileColl;
      event.parentObj = group;
      event.rank = comm.rank;
      event.coll = collective;
      v4_->startEvent(comm.context, &handle, &event);
    } else {
      ncclProfilerEventDescr_v5_t event = {};
      event.type = ncclProfileColl;
      event.parentObj = task.api;
      event.rank = comm.rank;
      event.coll = collective;
      v5_->startEvent(comm.context, &handle, &event);
    }
    return handle;
  }

  int version_;
  void* handle_;
  const ncclProfiler_v4_t* v4_;
  const ncclProfiler_v5_t* v5_;
  int mask_ = 0;
};
