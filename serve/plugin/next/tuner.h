// A vendor's tuner plugin behind ours: asked first on every call, so that "NCCL's own choice" means
// what would run without us.
//
// Environment (read once per process, when the first communicator is created):
//   DYNAMICCL_NEXT_TUNER  the vendor's plugin: a path or soname, or NAME for
//                         libnccl-tuner-NAME.so, as NCCL_TUNER_PLUGIN takes it.
#pragma once

#include <atomic>

#include "../tuner.h"  // not this one: quotes look here first
#include "next/library.h"

namespace dynamiccl {

/// What NCCL passed to getCollInfo. `collnet_support`, `nvls_support`, `algorithm` and `protocol`
/// are of v2 alone, `costs` and `reg_buff` of the others.
struct Question {
  int collective;
  std::size_t size_bytes;
  int num_pipe_ops;
  int reg_buff;
  CostTable costs;
  int collnet_support;
  int nvls_support;
  int* algorithm;
  int* protocol;
  int* num_channels;
};

/// What NCCL holds for a communicator when there is a next tuner: ours, which may be null, and
/// theirs. Its address is marked, since without a next tuner NCCL holds a Context.
class TunerLink {
 public:
  /// The next tuner's functions for NCCL's version `abi_version`; null when there is none. A plugin
  /// that cannot be used costs one line in the log.
  static const NextPlugin* find(int abi_version, ncclDebugLogger_t logger) noexcept;

  /// Their init, then ours. An error of either fails the communicator, as it would without the
  /// other.
  static ncclResult_t create(const NextPlugin* next, const Communicator& communicator,
                             ncclNvlDomainInfo_v5_t* domains, ncclTunerConstants_v5_t* constants,
                             void** context) noexcept;

  /// Whether NCCL's `context` is a link, and no Context.
  static bool is_one(void* context) noexcept {
    return (reinterpret_cast<std::uintptr_t>(context) & kMark) != 0;
  }
  /// The link that NCCL's `context` means; null when it is a Context.
  static TunerLink* of(void* context) noexcept {
    const auto bits = reinterpret_cast<std::uintptr_t>(context);
    return is_one(context) ? reinterpret_cast<TunerLink*>(bits - kMark) : nullptr;
  }

  ncclResult_t answer(const Question& question) noexcept;
  ncclResult_t answer_v2(const Question& question) noexcept;
  ncclResult_t answer_chunk(int collective, std::size_t size_bytes, int algorithm, int protocol,
                            int num_channels, std::size_t* chunk_bytes) noexcept;

  /// Ours is retired, then theirs finalized. As in Context::retire, calls may still be inside.
  static ncclResult_t retire(TunerLink* link) noexcept;

 private:
  static constexpr std::uintptr_t kMark = 1;

  TunerLink() = default;
  ncclResult_t ask_next(const Question& question) noexcept;
  ncclResult_t finalize_next() noexcept;

  const NextPlugin* next_ = nullptr;
  void* theirs_ = nullptr;
  Context* ours_ = nullptr;
  std::atomic<bool> is_closing_{false};
  std::atomic<int> inside_{0};
};

}  // namespace dynamiccl
