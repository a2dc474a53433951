// NCCL's part towards a profiler, rule by rule: which events it starts under which mask, in which
// order, and what it does over a plugin of an older ABI (`src/plugin/profiler.cc`,
// `src/plugin/profiler/profiler_v4.cc`, _v5.cc). One thread; kernels and proxies run when told.
#pragma once

#include <dlfcn.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "nccl/profiler_abi.h"
#include "tests/library.h"

/// One call of a group.
struct ApiCall {
  bool is_p2p = false;
  bool captured = false;
  int num_channels = 2;
};

/// What NCCL keeps of it until its kernels have ended.
struct Launch {
  ApiCall call;
  int mask = 0;  // read when it was called
  void* api = nullptr;
  void* group_api = nullptr;
  void* task = nullptr;
};

struct Comm {
  void* context = nullptr;
  std::uint64_t id = 0;
  std::uint64_t sequence = 0;
};

class NcclEvents {
 public:
  /// `release` is 27, 28 or 30: ABI v4, v5 or v6, and the older ones that it takes.
  NcclEvents(const char* path, int release)
      : abi_(release == 27 ? 4 : (release == 28 ? 5 : 6)),
        library_(dlopen(path, RTLD_NOW | RTLD_LOCAL)) {
    for (version_ = abi_; version_ >= 4 && plugin_ == nullptr; --version_) {
      plugin_ = dlsym(library_, ("ncclProfiler_v" + std::to_string(version_)).c_str());
    }
    ++version_;
    if (plugin_ == nullptr) {
      std::fprintf(stderr, "%s: no profiler\n", path);
      std::exit(1);
    }
  }
  NcclEvents(const NcclEvents&) = delete;
  NcclEvents& operator=(const NcclEvents&) = delete;

  int version() const { return version_; }
  int* mask_pointer() { return &mask_; }
  int mask() const { return __atomic_load_n(&mask_, __ATOMIC_RELAXED); }

  Comm init(std::uint64_t id, int rank = 0) {
    Comm comm;
    comm.id = id;
    const ncclResult_t result =
        version_ == 4 ? v4()->init(&comm.context, &mask_, "name", id, 2, 8, rank, keep_line)
                      : v5()->init(&comm.context, id, &mask_, "name", 2, 8, rank, keep_line);
    if (result == ncclSuccess && version_ == 5 && abi_ == 6) mask_ &= ~kCe;
    return comm;
  }

  void finalize(Comm* comm) {
    if (comm->context != nullptr || abi_ == 4) v4()->finalize(comm->context);
    comm->context = nullptr;
  }

  /// The calls of a group, from ncclGroupStart to the plan.
  std::vector<Launch> call(Comm* comm, const std::vector<ApiCall>& calls) {
    std::vector<Launch> launches;
    void* group_api = nullptr;
    bool is_begun = false;
    for (const ApiCall& call : calls) {
      Launch launch;
      launch.call = call;
      launch.mask = mask();
      if (abi_ > 4) start_api(comm, &launch, &group_api, &is_begun);
      launches.push_back(launch);
    }
    if (group_api != nullptr) record(group_api, 24, nullptr);
    for (Launch& launch : launches) launch.group_api = group_api;
    return launches;
  }

  /// The plan on its stream, and the end of the group.
  void launch(Comm* comm, std::vector<Launch>* launches, bool is_replay = false) {
    constexpr int kOp = ncclProfileProxyOp | ncclProfileProxyStep | ncclProfileNetPlugin;
    constexpr int kTask = kOp | ncclProfileKernelCh;
    int first = 0;
    for (const bool is_p2p : {false, true}) {
      for (const Launch& launch : *launches) {
        if (first == 0 && launch.call.is_p2p == is_p2p) first = launch.mask;
      }
    }
    void* group = nullptr;
    if ((first & (kTask | ncclProfileGroup | ncclProfileColl | ncclProfileP2p)) != 0) {
      group = start(comm->context, ncclProfileGroup, nullptr, [](auto*) {});
    }
    for (Launch& launch : *launches) {
      const int own = launch.call.is_p2p ? ncclProfileP2p : ncclProfileColl;
      const int below = launch.call.is_p2p && abi_ == 4 ? kTask & ~ncclProfileNetPlugin : kTask;
      launch.task = nullptr;
      if ((launch.mask & (own | below)) != 0 && (abi_ > 4 || group != nullptr)) {
        launch.task = start_task(comm, launch, group);
      }
      if (!launch.call.captured || (launch.mask & ncclProfileKernelCh) != 0) ++comm->sequence;
    }
    void* kernel_launch = nullptr;
    if (abi_ > 4 && (first & ncclProfileKernelLaunch) != 0) {
      kernel_launch =
          start(comm->context, ncclProfileKernelLaunch, launches->front().group_api, [](auto*) {});
    }
    stop(kernel_launch);
    for (const Launch& launch : *launches) stop(launch.task);
    stop(group);
    if (!is_replay) stop(launches->front().group_api);
  }

  /// The kernel and the network's part of a launched call, on the proxy's thread. With `pid` of
  /// another process, that one's ProxyOp.
  void progress(const Comm& comm, const Launch& launch, int pid = getpid()) {
    const bool is_own = pid == getpid();
    void* const context = is_own ? comm.context : reinterpret_cast<void*>(0x100000001);
    void* const task = is_own ? launch.task : reinterpret_cast<void*>(0x7f0000001230);
    constexpr int kStep = ncclProfileProxyStep | ncclProfileNetPlugin;
    for (int channel = 0; channel < launch.call.num_channels; ++channel) {
      if (is_own && (launch.mask & ncclProfileKernelCh) != 0) kernel(comm, launch, channel);
      void* op = nullptr;
      if ((launch.mask & (kStep | ncclProfileProxyOp)) != 0) {
        op = start(context, ncclProfileProxyOp, task, [&](auto* event) {
          event->proxyOp = {pid, static_cast<std::uint8_t>(channel), 3, 1, 4096, 1};
        });
      }
      if (op != nullptr) record(op, 19, &no_arguments_);
      void* step = nullptr;
      if ((launch.mask & kStep) != 0 && (abi_ > 4 || op != nullptr)) {
        step = start(context, ncclProfileProxyStep, op, [](auto*) {});
      }
      if (op != nullptr && step != nullptr) record(step, 20, &no_arguments_);
      if ((launch.mask & ncclProfileNetPlugin) != 0) {
        void* net = start(context, ncclProfileNetPlugin, step,
                          [](auto* event) { event->netPlugin = {65537, nullptr}; });
        if (net != nullptr) record(net, 21, &no_arguments_);
        stop(net);
      }
      stop(step);
      stop(op);
    }
  }

  void* start_kernel(const Comm& comm, const Launch& launch, int channel) {
    return start(comm.context, ncclProfileKernelCh, launch.task, [&](auto* event) {
      event->kernelCh = {static_cast<std::uint8_t>(channel), 1000};
    });
  }

  void kernel(const Comm& comm, const Launch& launch, int channel) {
    void* handle = start_kernel(comm, launch, channel);
    if (handle == nullptr) return;
    ncclProfilerEventStateArgs_v4_t arguments = {};
    arguments.kernelCh.pTimer = 2000;
    record(handle, ncclProfilerKernelChStop, &arguments);
    stop(handle);
  }

  /// The proxy's thread goes to sleep and wakes up.
  void control(const Comm& comm) {
    if ((mask() & ncclProfileProxyCtrl) == 0) return;
    void* handle = start(comm.context, ncclProfileProxyCtrl, nullptr, [](auto*) {});
    if (handle != nullptr && (mask() & ncclProfileProxyCtrl) != 0) {
      record(handle, 13, &no_arguments_);
    }
    stop(handle);
  }

  /// A collective of the copy engines, under its call.
  void copy(Comm* comm) {
    if (abi_ < 6) return;
    void* group_api = nullptr;
    bool is_begun = false;
    Launch launch;
    launch.mask = mask();
    start_api(comm, &launch, &group_api, &is_begun);
    if ((mask() & kCe) != 0) {
      void* coll = start(comm->context, ncclProfileCeColl, launch.api, [](auto* event) {
        if constexpr (std::is_same_v<decltype(event), ncclProfilerEventDescr_v5_t*>) {
          event->ceColl.func = "AllGather";
          event->ceColl.syncStrategy = "MC";
        }
      });
      for (const int type : {ncclProfileCeSync, ncclProfileCeBatch}) {
        if (coll == nullptr || (mask() & type) == 0) continue;
        stop(start(comm->context, static_cast<std::uint64_t>(type), coll, [](auto*) {}));
      }
      stop(coll);
    }
    stop(group_api);
  }

  void stop(void* handle) const {
    if (handle != nullptr) v4()->stopEvent(handle);
  }

 private:
  static constexpr int kCe = ncclProfileCeColl | ncclProfileCeSync | ncclProfileCeBatch;

  const ncclProfiler_v4_t* v4() const { return static_cast<const ncclProfiler_v4_t*>(plugin_); }
  const ncclProfiler_v5_t* v5() const { return static_cast<const ncclProfiler_v5_t*>(plugin_); }

  void start_api(Comm* comm, Launch* launch, void** group_api, bool* is_begun) {
    constexpr int kBelow =
        ncclProfileProxyOp | ncclProfileProxyStep | ncclProfileKernelCh | ncclProfileNetPlugin;
    constexpr int kP2p = ncclProfileP2pApi | ncclProfileP2p | kBelow;
    const int ce = abi_ > 5 ? kCe : 0;
    const int coll = ncclProfileCollApi | ncclProfileColl | kBelow | ce;
    const int group =
        kP2p | coll | ncclProfileKernelLaunch | ncclProfileGroup | ncclProfileGroupApi;
    if (!*is_begun && (launch->mask & group) != 0) {
      *is_begun = true;
      *group_api = start(comm->context, ncclProfileGroupApi, nullptr, [&](auto* event) {
        if constexpr (std::is_same_v<decltype(event), ncclProfilerEventDescr_v5_t*>) {
          event->groupApi = {launch->call.captured, 1};
        }
      });
      if (*group_api != nullptr) record(*group_api, 23, nullptr);
    }
    const int type = launch->call.is_p2p ? ncclProfileP2pApi : ncclProfileCollApi;
    if ((launch->mask & (launch->call.is_p2p ? kP2p : coll)) == 0) return;
    launch->api =
        start(comm->context, static_cast<std::uint64_t>(type), *group_api, [&](auto* event) {
          if constexpr (std::is_same_v<decltype(event), ncclProfilerEventDescr_v5_t*>) {
            if (launch->call.is_p2p) {
              event->p2pApi = {"Send", 7, "ncclInt8", nullptr, launch->call.captured};
            } else {
              event->collApi = {"AllReduce", 1024,    "ncclFloat32",
                                0,           nullptr, launch->call.captured};
            }
          }
        });
    stop(launch->api);
  }

  void* start_task(Comm* comm, const Launch& launch, void* group) {
    const int type = launch.call.is_p2p ? ncclProfileP2p : ncclProfileColl;
    const auto channels = static_cast<std::uint8_t>(launch.call.num_channels);
    void* const parent = version_ == 4 ? group : launch.api;
    return start(comm->context, static_cast<std::uint64_t>(type), parent, [&](auto* event) {
      if (launch.call.is_p2p) {
        event->p2p = {"Send", nullptr, "ncclInt8", 7, 5, channels};
      } else {
        event->coll = {comm->sequence, "AllReduce", nullptr, nullptr, 1024,   0,
                       "ncclFloat32",  channels,    16,      "RING",  "LL128"};
      }
      if constexpr (std::is_same_v<decltype(event), ncclProfilerEventDescr_v5_t*>) {
        (launch.call.is_p2p ? event->p2pOfGroup.parentGroup : event->collOfGroup.parentGroup) =
            group;
      }
    });
  }

  template <typename Fill>
  void* start(void* context, std::uint64_t type, void* parent, const Fill& fill) {
    const std::uint64_t newest = version_ == 4   ? ncclProfileNetPlugin
                                 : version_ == 5 ? ncclProfileKernelLaunch
                                                 : ncclProfileCeBatch;
    void* handle = nullptr;
    if (type > newest) return handle;
    const auto run = [&](auto* profiler, auto event) {
      event.type = static_cast<decltype(event.type)>(type);
      event.parentObj = parent;
      event.rank = type == ncclProfileColl || type == ncclProfileP2p ? 6 : 0;
      fill(&event);
      profiler->startEvent(context, &handle, &event);
    };
    if (version_ == 4) {
      run(v4(), ncclProfilerEventDescr_v4_t{});
    } else {
      run(v5(), ncclProfilerEventDescr_v5_t{});
    }
    return handle;
  }

  void record(void* handle, int state, ncclProfilerEventStateArgs_v4_t* arguments) const {
    if (version_ == 4 && state > 22) return;
    v4()->recordEventState(handle, state, arguments);
  }

  int abi_;
  void* library_;
  int version_ = 0;  // of the plugin's struct
  const void* plugin_ = nullptr;
  int mask_ = 0;
  ncclProfilerEventStateArgs_v4_t no_arguments_ = {};
};
