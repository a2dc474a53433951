// One communicator's brain in TorchScript: `brain.pt` of its artifact (serve/brain_module.py).
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "brain/message.h"
#include "table.h"

namespace dynamiccl {

class ScriptedBrain {
 public:
  /// Loads the module and decides the cold table, which is the warm-up as well. Throws
  /// std::exception with a reason.
  explicit ScriptedBrain(const BrainAsk& ask);
  ~ScriptedBrain();
  ScriptedBrain(const ScriptedBrain&) = delete;
  ScriptedBrain& operator=(const ScriptedBrain&) = delete;

  /// The bytes of the next table. Throws where the module does.
  std::vector<std::uint8_t> decide(const std::vector<TimedTask>& tasks);

 private:
  struct Module;

  std::unique_ptr<Module> module_;
  std::vector<std::int64_t> shape_;  // num_nodes, num_ranks, ranks_per_node, first_bin, num_bins
  std::vector<Entry> cold_;
};

}  // namespace dynamiccl
