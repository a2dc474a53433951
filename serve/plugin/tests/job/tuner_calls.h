// One tuner struct of a plugin, whichever version NCCL took, called with that version's arguments.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "nccl/tuner_abi.h"
#include "tests/job/release.h"

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

class TunerCalls {
 public:
  /// Takes the newest struct that both sides know, from a library opened with dlopen.
  TunerCalls(void* library, const Release& release);

  /// 0 when the library has none of them: NCCL then uses its internal tuner.
  int version() const { return version_; }

  ncclResult_t init(void** context, std::uint64_t comm_id, int num_ranks, int num_nodes,
                    ncclDebugLogger_t logger) const;
  TunerAnswer ask(void* context, const TunerQuestion& question, std::vector<float> costs) const;
  bool has_chunks() const;
  ncclResult_t chunk(void* context, int collective, std::size_t size_bytes, int algorithm,
                     int protocol, int num_channels, std::size_t* chunk_bytes) const;
  ncclResult_t finalize(void* context) const;

 private:
  template <typename Struct>
  const Struct* as() const {
    return static_cast<const Struct*>(symbol_);
  }

  const Release& release_;
  int version_ = 0;
  const void* symbol_ = nullptr;
};
