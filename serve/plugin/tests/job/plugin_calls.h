// What a plugin can notice of an NCCL release, 2.24 to 2.30: which structs it takes, and how it
// calls them, with that version's arguments and event descriptors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "nccl/tuner_abi.h"

struct Release {
  std::string name;
  int version;                         // as ncclGetVersion gives it
  std::vector<int> tuner_versions;     // in the order in which the symbols are looked up
  std::vector<int> profiler_versions;  // those from v4 on; older ones cannot be joined to a rank
  int num_algorithms;
  bool has_api_events;  // 2.28 on: GroupApi and CollApi around the rest
  bool has_allgatherv;  // 2.29 on: made of broadcasts of several roots in one group
};

/// The release called `name`, as "2.28"; throws std::invalid_argument with the choices.
const Release& release_named(const std::string& name);

/// One struct that a plugin exports, the newest of some versions.
class Symbol {
 public:
  /// 0 when the library has none of them.
  int version() const { return version_; }

 protected:
  Symbol(void* library, const std::string& prefix, const std::vector<int>& versions);
  template <typename Struct>
  const Struct* as() const {
    return static_cast<const Struct*>(symbol_);
  }

  int version_ = 0;

 private:
  const void* symbol_ = nullptr;
};

/// What NCCL asks a tuner about one aggregate of collectives.
struct TunerQuestion {
  int collective;
  std::size_t size_bytes;
  int num_pipe_ops;
  int reg_buff;
};

/// What NCCL holds once the tuner has answered.
struct TunerAnswer {
  ncclResult_t result;
  std::vector<float> costs;  // as the tuner left it
  int num_channels;          // 0: NCCL's own
};

class TunerCalls : public Symbol {
 public:
  TunerCalls(void* library, const Release& release);
  ncclResult_t init(void** context, std::uint64_t comm_id, int num_ranks, int num_nodes,
                    ncclDebugLogger_t logger) const;
  TunerAnswer ask(void* context, const TunerQuestion& question, std::vector<float> costs) const;
  ncclResult_t finalize(void* context) const;

 private:
  const Release& release_;
};

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

class ProfilerCalls : public Symbol {
 public:
  ProfilerCalls(void* library, const Release& release);
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
  template <typename Fill>
  void* start(void* context, std::uint64_t type, void* parent, int rank, const Fill& fill) const;
  template <typename Fill>
  void* start_v5(void* context, std::uint64_t type, void* parent, const Fill& fill) const;
};

/// NCCL's spelling in events (`src/collectives.cc`).
const char* collective_name(int collective);
const char* algorithm_name(int algorithm);
const char* protocol_name(int protocol);
