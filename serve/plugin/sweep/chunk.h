// Tells which getChunkSize calls belong to the latest getCollInfo.
//
// NCCL asks about each part of a collective on its own, with the part's size: nothing in the
// question says which call it belongs to (`src/enqueue.cc`, v2.30.7-1). In a group all getCollInfo
// calls come first, so with two of them before it a question may be about either.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "vocabulary.h"

namespace dynamiccl {

/// NCCL rounds a chunk down to these, and divides by what is left (the same place).
inline constexpr std::size_t kGrainBytes[kNumProtocols] = {16, 1920, 512};

class ChunkTurn {
 public:
  /// A getCollInfo has come.
  void question() noexcept {
    questions_ = asked_ ? 1 : std::min(questions_ + 1, 2U);
    asked_ = false;
    chunk_bytes_ = 0;
  }

  /// It was answered with this cell, and its chunks are to have so many bytes (0: NCCL's own).
  void answered(int collective, int cell, std::int32_t chunk_bytes) noexcept {
    collective_ = collective;
    cell_ = cell;
    chunk_bytes_ = chunk_bytes;
  }

  /// A getChunkSize: true when the chunk was set, which is never above NCCL's own nor below a
  /// grain.
  bool answer(int collective, int algorithm, int protocol, std::size_t* chunk_bytes) noexcept {
    asked_ = true;
    if (chunk_bytes_ == 0 || questions_ != 1 || collective != collective_ ||
        algorithm != cell_ / kNumProtocols || protocol != cell_ % kNumProtocols) {
      return false;
    }
    const std::size_t grain = kGrainBytes[protocol];
    if (*chunk_bytes < grain) return false;  // more than this would not be ours to give
    const std::size_t wanted = std::min(*chunk_bytes, static_cast<std::size_t>(chunk_bytes_));
    *chunk_bytes = std::max<std::size_t>(wanted / grain, 1) * grain;
    return true;
  }

 private:
  std::uint32_t questions_ = 0;  // getCollInfo calls since the last run of getChunkSize calls
  bool asked_ = false;           // such a run has begun
  int collective_ = -1;
  int cell_ = -1;
  std::int32_t chunk_bytes_ = 0;
};

}  // namespace dynamiccl
