// Which events a profiler hears of, by NCCL's own rules (`src/plugin/profiler.cc`, 2.27 to 2.30).
#pragma once

#include <cstdint>

#include "nccl/profiler_abi.h"
#include "next/pairs.h"

namespace dynamiccl {

/// The bits of an event mask any of which makes NCCL start events of this type: its own, and those
/// of the events below it.
constexpr int bits_that_start(std::uint64_t type, int abi_version) noexcept {
  const int ce = abi_version > 5 ? ncclProfileCeColl | ncclProfileCeSync | ncclProfileCeBatch : 0;
  constexpr int kStep = ncclProfileProxyStep | ncclProfileNetPlugin;
  constexpr int kOp = ncclProfileProxyOp | kStep;
  constexpr int kTask = kOp | ncclProfileKernelCh;
  constexpr int kGroup = ncclProfileGroup | ncclProfileColl | ncclProfileP2p | kTask;
  switch (type) {
    case ncclProfileGroupApi:
      return kGroup | ncclProfileGroupApi | ncclProfileCollApi | ncclProfileP2pApi |
             ncclProfileKernelLaunch | ce;
    case ncclProfileCollApi:
      return ncclProfileCollApi | ncclProfileColl | kTask | ce;
    case ncclProfileP2pApi:
      return ncclProfileP2pApi | ncclProfileP2p | kTask;
    case ncclProfileGroup:
      return kGroup;
    case ncclProfileColl:
      return ncclProfileColl | kTask;
    case ncclProfileP2p:
      return ncclProfileP2p | (abi_version == 4 ? kTask & ~ncclProfileNetPlugin : kTask);
    case ncclProfileProxyOp:
      return kOp;
    case ncclProfileProxyStep:
      return kStep;
    case ncclProfileCeColl:
      return ce;
    case ncclProfileProxyCtrl:
    case ncclProfileKernelCh:
    case ncclProfileNetPlugin:
    case ncclProfileKernelLaunch:
    case ncclProfileCeSync:
    case ncclProfileCeBatch:
      return static_cast<int>(type);
    default:
      return 0;
  }
}

/// Whether NCCL goes by the mask of the moment, not by the one that the event's call was made
/// under.
constexpr bool goes_by_moment(std::uint64_t type) noexcept {
  return (type &
          (ncclProfileGroupApi | ncclProfileCollApi | ncclProfileP2pApi | ncclProfileGroup |
           ncclProfileProxyCtrl | ncclProfileCeColl | ncclProfileCeSync | ncclProfileCeBatch)) != 0;
}

/// Whether NCCL starts one only if the profiler gave a handle to the event above it.
constexpr bool needs_parent(std::uint64_t type, int abi_version) noexcept {
  constexpr int kOf27 = ncclProfileColl | ncclProfileP2p | ncclProfileProxyStep;
  return (type & (ncclProfileCeSync | ncclProfileCeBatch)) != 0 ||
         (abi_version == 4 && (type & kOf27) != 0);
}

/// Whether no event belongs to one of this type.
constexpr bool is_leaf(std::uint64_t type) noexcept {
  return (type & (ncclProfileKernelLaunch | ncclProfileProxyCtrl | ncclProfileKernelCh |
                  ncclProfileNetPlugin | ncclProfileCeSync | ncclProfileCeBatch)) != 0;
}

/// Whether version `version` of the ABI has events of this type. NCCL passes those that it has not
/// over an older profiler, and the same with states (`src/plugin/profiler/profiler_v4.cc`, _v5.cc).
constexpr bool knows_event(int version, std::uint64_t type) noexcept {
  const std::uint64_t newest = version == 4
                                   ? ncclProfileNetPlugin
                                   : (version == 5 ? ncclProfileKernelLaunch : ncclProfileCeBatch);
  return type <= newest;
}

constexpr bool knows_state(int version, ncclProfilerEventState_t state) noexcept {
  const int newest =
      version == 4 ? ncclProfilerKernelChStop
                   : (version == 5 ? ncclProfilerGroupEndApiStart : ncclProfilerCeBatchComplete);
  return state >= ncclProfilerProxyStepSendGPUWait && state <= newest;
}

/// Whether it is one of ProxyStep's states.
constexpr bool is_of_step(ncclProfilerEventState_t state) noexcept {
  return (state >= ncclProfilerProxyStepSendGPUWait && state < ncclProfilerProxyCtrlIdle) ||
         state == ncclProfilerProxyStepSendPeerWait;
}

constexpr bool is_of_control(ncclProfilerEventState_t state) noexcept {
  return state >= ncclProfilerProxyCtrlIdle && state <= ncclProfilerProxyCtrlAppendEnd;
}

constexpr PairLife life_of_event(const ncclProfilerEventDescr_v5_t& event) noexcept {
  switch (event.type) {
    case ncclProfileGroupApi:
      return event.groupApi.graphCaptured ? PairLife::captured : PairLife::call;
    case ncclProfileCollApi:
      return event.collApi.graphCaptured ? PairLife::captured : PairLife::call;
    case ncclProfileP2pApi:
      return event.p2pApi.graphCaptured ? PairLife::captured : PairLife::call;
    case ncclProfileGroup:
    case ncclProfileColl:
    case ncclProfileP2p:
      return PairLife::task;
    default:
      return PairLife::brief;
  }
}

}  // namespace dynamiccl
