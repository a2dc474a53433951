// One communicator in mode adaptive: its calls pass through the agreement's clock, and look up in
// the table that is in force.
//
// The law: a job under this plugin is never hung, never crashed, never slower than NCCL's own
// choice. In doubt nothing is written and success is returned. NCCL exchanges nothing about tuner
// answers, so all ranks must answer alike: a decision depends on the call's arguments, the table
// and which cells are available, and never on time, on a rank's own state or on chance.
//
// Environment (read once per communicator, at its creation):
//   DYNAMICCL_DISABLE   1: abstain.
// and those of agreement/settings.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "adaptive/agreement/agreement.h"
#include "choice.h"
#include "identity/communicator.h"
#include "nccl/tuner_abi.h"
#include "table.h"

namespace dynamiccl {

/// Opaque to NCCL, which holds it as `void*`; a null one is a communicator that abstains.
class Context {
 public:
  /// The context of a communicator; null when it abstains, and then a line says why.
  static Context* create(const Communicator& communicator) noexcept;

  /// The line alone.
  static void abstain(const Communicator& communicator, const char* reason) noexcept;

  /// Give a context back. ncclCommAbort calls this from another thread while a call may be inside
  /// `answer` (`src/init.cc`): it waits for such calls, and rather leaks than frees under one.
  static void retire(Context* context) noexcept;

  /// Set the chosen cell to 0.0 and, with it, the channels; or touch nothing. An error only where
  /// the ranks' agreement has broken down, and the communicator with it.
  ncclResult_t answer(int collective, std::size_t size_bytes, CostTable costs,
                      int* num_channels) noexcept;

  Context(Agreement* agreement, const Communicator& communicator) noexcept
      : agreement_(agreement),
        clock_(agreement->clock()),
        num_nodes_(static_cast<std::int32_t>(communicator.num_nodes)),
        logger_(communicator.logger) {}

 private:
  friend struct Inspect;  // the tests, which hold a call open

  bool pass_gate(ncclResult_t* result) noexcept;
  void speak() noexcept;
  void speak_last() noexcept;

  Agreement* const agreement_;
  Clock* const clock_;  // the agreement's
  const std::int32_t num_nodes_;
  const ncclDebugLogger_t logger_;
  Context* left_before_ = nullptr;  // once it is left behind: another that was
};

}  // namespace dynamiccl
