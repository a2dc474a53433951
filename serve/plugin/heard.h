// What ours makes of an event as NCCL describes it, in any version's descriptor.
#pragma once

#include <type_traits>

#include "nccl/profiler_abi.h"
#include "profiler.h"

namespace dynamiccl {

/// The handle of an event that starts; null where nothing more needs to be heard of it, and NCCL
/// looks at that.
template <typename Descr>
void* hear_start(Profiler* profiler, const Descr& event) noexcept {
  if constexpr (!std::is_same_v<Descr, ncclProfilerEventDescr_v4_t>) {
    if (event.type == ncclProfileCollApi) {
      return profiler->start_call(false, event.collApi.graphCaptured);
    }
    if (event.type == ncclProfileKernelLaunch) {
      profiler->launch();
      return nullptr;
    }
  }
  switch (event.type) {
    case ncclProfileKernelCh:
      return Profiler::start_kernel(event.parentObj, event.kernelCh.channelId,
                                    event.kernelCh.pTimer);
    case ncclProfileColl:
      return profiler->start_collective(event.coll, event.parentObj);
    case ncclProfileGroup:
      // Never null: without it 2.27 starts no events of collectives.
      return profiler->start_call(true, false);
    case ncclProfileP2p:
      profiler->start_other();
      return nullptr;
    default:
      return nullptr;
  }
}

inline void hear_state(void* handle, ncclProfilerEventState_t state,
                       const ncclProfilerEventStateArgs_v4_t* arguments) noexcept {
  if (state == ncclProfilerKernelChStop && arguments != nullptr) {
    Profiler::stop_kernel(handle, arguments->kernelCh.pTimer);
  }
}

}  // namespace dynamiccl
