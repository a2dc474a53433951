// From NCCL's events, in any version's descriptor, to the profiler's functions.
#pragma once

#include <type_traits>

#include "nccl/profiler_abi.h"
#include "profiler/profiler.h"

namespace dynamiccl {

/// The handle of an event that starts; null where nothing more needs to be heard of it, and NCCL
/// looks at that. `profiler` may be null.
template <typename Descr>
void* start_event(Profiler* profiler, const Descr& event) noexcept {
  if constexpr (!std::is_same_v<Descr, ncclProfilerEventDescr_v4_t>) {
    if (event.type == ncclProfileGroupApi) return Profiler::start_group();
    if (profiler == nullptr) return nullptr;
    if (event.type == ncclProfileCollApi) {
      return profiler->start_call(false, event.collApi.graphCaptured, event.parentObj);
    }
    if (event.type == ncclProfileKernelLaunch) {
      profiler->launch(event.parentObj);
      return nullptr;
    }
  }
  if (profiler == nullptr) return nullptr;
  switch (event.type) {
    case ncclProfileKernelCh:
      return Profiler::start_kernel(event.parentObj, event.kernelCh.channelId,
                                    event.kernelCh.pTimer);
    case ncclProfileColl:
      return profiler->start_collective(event.coll, event.parentObj);
    case ncclProfileGroup:
      // Never null: without it 2.27 starts no events of collectives.
      return profiler->start_call(true, false, nullptr);
    case ncclProfileP2p:
      profiler->start_other();
      return nullptr;
    default:
      return nullptr;
  }
}

inline void record_event_state(void* handle, ncclProfilerEventState_t state,
                               const ncclProfilerEventStateArgs_v4_t* arguments) noexcept {
  if (state == ncclProfilerKernelChStop && arguments != nullptr) {
    Profiler::stop_kernel(handle, arguments->kernelCh.pTimer);
  }
}

}  // namespace dynamiccl
