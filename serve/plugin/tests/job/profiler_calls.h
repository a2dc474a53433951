// One profiler struct of a plugin, whichever version NCCL took, called with that version's
// arguments and event descriptors.
#pragma once

#include <cstddef>
#include <cstdint>

#include "nccl/tuner_abi.h"
#include "tests/job/release.h"

/// A collective as NCCL describes it to a profiler (the `coll` event).
struct CollectiveEvent {
  int rank;
  std::uint64_t sequence;
  int collective;
  std::size_t count;
  const char* datatype;
  int num_channels;
  int num_warps;
  int algorithm;
  int protocol;
};

class ProfilerCalls {
 public:
  /// Takes the newest struct that both sides know, from a library opened with dlopen.
  ProfilerCalls(void* library, const Release& release);

  /// 0 when the library has none of them.
  int version() const { return version_; }

  ncclResult_t init(void** context, std::uint64_t comm_id, int* mask, int num_nodes, int num_ranks,
                    int rank, ncclDebugLogger_t logger) const;
  // The first four from v5 on only.
  void* start_group_api(void* context, bool captured) const;
  void* start_coll_api(void* context, void* group_api, int collective, std::size_t count,
                       const char* datatype, bool captured) const;
  void* start_p2p_api(void* context, void* group_api) const;
  void* start_kernel_launch(void* context, void* group_api) const;
  void* start_group(void* context) const;
  /// `parent` is the Group event in v4, the CollApi event from v5 on.
  void* start_collective(void* context, void* parent, const CollectiveEvent& event) const;
  /// One ncclSend of its plan.
  void* start_p2p(void* context, void* group, int rank) const;
  void* start_kernel(void* context, void* collective, int channel, std::uint64_t start_ns) const;
  void stop_kernel(void* kernel, std::uint64_t stop_ns) const;
  void record(void* handle, int state) const;
  void stop(void* handle) const;
  ncclResult_t finalize(void* context) const;

 private:
  template <typename Struct>
  const Struct* as() const {
    return static_cast<const Struct*>(symbol_);
  }
  template <typename Fill>
  void* start(void* context, std::uint64_t type, void* parent, int rank, const Fill& fill) const;

  int version_ = 0;
  const void* symbol_ = nullptr;
};

/// NCCL's spelling in events (`src/collectives.cc`).
const char* collective_name(int collective);
const char* algorithm_name(int algorithm);
const char* protocol_name(int protocol);
