// The tuner behind all ABI versions: one Context per communicator, and the decision itself.
//
// The law: a job under this plugin is never hung, never crashed, never slower than NCCL's own
// choice. In doubt nothing is written and success is returned. NCCL exchanges nothing about tuner
// answers, so all ranks must answer alike: a decision depends on the call's arguments, the table
// and which cells are available, and never on time, on a rank's own state or on chance.
//
// That is table mode. Sweep mode (sweep.h) is for benchmarks alone, and there the first sentence
// does not hold: a schedule that cannot be played fails the communicator at once, on purpose, since
// ranks that disagree would hang it later.
//
// Environment (read once per communicator, at its creation):
//   DYNAMICCL_MODE      `table`, or `sweep`, which reads the variables in sweep.h and none of those
//                       below. Default: table. Anything else: abstain.
//   DYNAMICCL_ARTIFACT  directory of the deployed artifact. Default: none, abstain.
//   DYNAMICCL_SYSTEM    the system's name, [a-z0-9._-]: which tables in it are for this machine.
//                       Default: none, abstain. `dynamiccl-deploy env ARTIFACT` prints it.
//   NCCL_ALGO, NCCL_PROTO  with the v2 ABI only: when set, abstain. From v3 on they show in the
//                       cost table; 2.21 would let a tuner override what the user asked for.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "choice.h"
#include "nccl/tuner_abi.h"
#include "sweep.h"
#include "table.h"

namespace dynamiccl {

/// What NCCL tells about a communicator when it is created.
struct Communicator {
  int abi_version;
  std::size_t num_ranks;
  std::size_t num_nodes;
  ncclDebugLogger_t logger;               // may be null
  const ncclNvlDomainInfo_v5_t* domains;  // null before v5
};

/// Opaque to NCCL, which holds it as `void*`; a null one is a communicator that abstains.
class Context {
 public:
  /// One call's stay inside a context; `retire` waits for it to end.
  class Call {
   public:
    explicit Call(Context* context) noexcept;
    ~Call();
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;
    /// False when the context is being retired: then nothing may be answered.
    bool entered() const noexcept { return entered_; }
    /// Whether no other call was inside when this one came.
    bool alone() const noexcept { return alone_; }

   private:
    Call(Context* context, std::uint32_t calls_before) noexcept;
    std::atomic<std::uint32_t>& calls_;
    const bool entered_;
    const bool alone_;
  };

  /// Make the context of a communicator, null when it abstains; either way one line says why.
  /// Returns an error in sweep mode alone.
  static ncclResult_t create(const Communicator& communicator, Context** context) noexcept;

  /// Give a context back. ncclCommAbort calls this from another thread while a call may be inside
  /// `answer` (`src/init.cc`): it waits for such calls, and rather leaks than frees under one.
  static void retire(Context* context) noexcept;

  /// v3 to v6: set the chosen cell to 0.0 and, with it, the channels; or touch nothing.
  void answer(int collective, std::size_t size_bytes, const CostTable& costs,
              int* num_channels) noexcept;

  /// v2 (NCCL 2.21): return the choice itself, for what is known to be runnable without a cost
  /// table; or touch nothing. NCCL does not check the answer there.
  void answer_v2(int collective, std::size_t size_bytes, int nvls_support, int* algorithm,
                 int* protocol, int* num_channels) noexcept;

  /// v6: lower the chunk size of a part of a collective; or touch nothing. Sweep mode alone does.
  void answer_chunk(int collective, int algorithm, int protocol, std::size_t* chunk_bytes) noexcept;

 private:
  Context() = default;
  static Context* allocate() noexcept;
  static void destroy(Context* context) noexcept;
  static Context* create_for_table(const Communicator& communicator) noexcept;
  static Context* create_for_sweep(const Communicator& communicator) noexcept;

  std::atomic<std::uint32_t> calls_{0};
  Player player_;        // loaded in sweep mode only
  DecisionTable table_;  // loaded in table mode only
};

}  // namespace dynamiccl
