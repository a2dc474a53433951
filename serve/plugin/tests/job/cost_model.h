// A cost model of the same form as NCCL's: not its figures, but which cells there are, that the
// cheapest one moves with the size, and what is decided after it (channels).
#pragma once

#include <cstddef>
#include <vector>

#include "vocabulary.h"

struct CostModel {
  int num_ranks;
  int num_nodes;
  int num_algorithms;

  /// Microseconds, flat [num_algorithms][3], -1.0 where not available. `fp8` relegates Ring on more
  /// than 8 ranks, as NCCL does for precision.
  std::vector<float> costs(int collective, std::size_t size_bytes, int num_pipe_ops,
                           bool fp8) const;

  /// NCCL's argmin over `costs`, ties to the lower cell; -1 when no cell is available.
  static int cheapest(const std::vector<float>& costs);

  int num_channels() const { return num_nodes > 1 ? 16 : 24; }
  int num_nvls_channels() const { return 16; }

  /// Channels that NCCL would use for it, of its own accord.
  int default_channels(int algorithm, int protocol, std::size_t size_bytes) const;

  /// Channels really used when at most `asked` may be; CollNet kinds take the number as it is.
  int used_channels(int collective, int algorithm, int protocol, std::size_t size_bytes,
                    int asked) const;

  /// Whether the algorithm is of CollNet's kind here, whose channels are not cut to fit.
  bool is_collnet(int algorithm) const;
};
