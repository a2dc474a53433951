// The tuner behind all ABI versions: one Context per communicator, and the decision itself.
//
// The law: a job under this plugin is never hung, never crashed, never slower than NCCL's own
// choice. In doubt nothing is written and success is returned. NCCL exchanges nothing about tuner
// answers, so all ranks must answer alike: a decision depends on the call's arguments, the table
// and which cells are available, and never on time, on a rank's own state or on chance.
//
// Environment (read once per communicator, at its creation):
//   DYNAMICCL_MODE      `table`, `table-static`, `adaptive`: decisions from an artifact, see
//                       agreement/settings.h. `observe`: nothing is decided, see profiler.h.
//                       Default: table. Anything else: abstain.
//   DYNAMICCL_DISABLE   1: abstain.
//   DYNAMICCL_UNSAFE    1, with DYNAMICCL_COORDINATOR=none, DYNAMICCL_ARTIFACT_SHA256 and
//                       DYNAMICCL_PREFLIGHT: decide from the first call on without asking the other
//                       ranks. A rank that then finds another artifact or machine abstains alone,
//                       which hangs the job: for whoever has looked at all nodes beforehand.
//   DYNAMICCL_NEXT_TUNER  a vendor's tuner, asked before ours: see next/tuner.h.
//   NCCL_ALGO, NCCL_PROTO  with the v2 ABI only: when set, abstain. From v3 on they show in the
//                       cost table; 2.21 would let a tuner override what the user asked for.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "agreement/agreement.h"
#include "choice.h"
#include "nccl/tuner_abi.h"
#include "table.h"

namespace dynamiccl {

/// What NCCL tells about a communicator when it is created.
struct Communicator {
  int abi_version;
  std::size_t num_ranks;
  std::size_t num_nodes;
  ncclDebugLogger_t logger;               // may be null
  const ncclNvlDomainInfo_v5_t* domains;  // null before v5
  std::uint64_t comm_id = 0;              // not told before v5
};

/// Opaque to NCCL, which holds it as `void*`; a null one is a communicator that abstains.
class Context {
 public:
  /// Make the context of a communicator, null when it abstains; then a line says why.
  static ncclResult_t create(const Communicator& communicator, Context** context) noexcept;

  /// Give a context back. ncclCommAbort calls this from another thread while a call may be inside
  /// `answer` (`src/init.cc`): it waits for such calls, and rather leaks than frees under one.
  static void retire(Context* context) noexcept;

  /// As long as it lives, retire() leaves the context (which may be null) where it is.
  class Stay {
   public:
    explicit Stay(Context* context) noexcept {
      if (context != nullptr) visit_.emplace(context->clock_);
    }
    /// False when the context is null or being retired.
    bool entered() const noexcept { return visit_.has_value() && visit_->entered(); }

   private:
    std::optional<Clock::Visit> visit_;
  };

  /// v3 to v6: set the chosen cell to 0.0 and, with it, the channels; or touch nothing. An error
  /// only where the ranks' agreement has broken down, and the communicator with it.
  ncclResult_t answer(int collective, std::size_t size_bytes, CostTable costs,
                      int* num_channels) noexcept;

  /// v2 (NCCL 2.21): return the choice itself, for what is known to be runnable without a cost
  /// table; or touch nothing. NCCL does not check the answer there.
  ncclResult_t answer_v2(int collective, std::size_t size_bytes, int nvls_support, int* algorithm,
                         int* protocol, int* num_channels) noexcept;

 private:
  friend struct Creation;
  friend struct Inspect;  // the tests, which hold a call open

  Context() = default;
  ~Context();
  /// What a call does at the gate: true to look into the table.
  bool pass_gate(ncclResult_t* result) noexcept;
  void speak() noexcept;
  void speak_last() noexcept;

  Agreement* agreement_ = nullptr;  // null where nobody is asked (DYNAMICCL_UNSAFE)
  Clock* clock_ = nullptr;          // of the agreement, or one's own
  bool owns_clock_ = false;
  std::int32_t num_nodes_ = 1;
  ncclDebugLogger_t logger_ = nullptr;
};

}  // namespace dynamiccl
