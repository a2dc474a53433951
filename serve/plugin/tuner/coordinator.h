// The coordinator's side of the agreement in `init`: a state machine without sockets, clocks or
// threads.
//
// A round is one communicator. It collects the votes of all ranks; if they are equal, it asks all
// ranks to confirm (an aborted `init` does not), and then sends all of them the table. In any other
// case, and at the time limit, which starts with the first vote, the decision is abstain, for all
// ranks and for any that come later. Decisions are final, and answered as long as the process
// lives: a rank that confirms the round's question, a random number sent to its own ranks only,
// gets the table. So votes need not be kept after the decision.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tuner/message.h"

namespace dynamiccl {

class Coordinator {
 public:
  /// The log entry of a decided round.
  struct Decided {
    std::uint64_t comm_id;
    std::uint32_t num_ranks;
    std::uint32_t num_votes;
    bool is_table;
    std::uint64_t took_ms;  // since the first vote
    const char* identity;   // of the first vote
    const char* reason;
  };
  using Log = void (*)(void* user, const Decided& decided);
  using Draw = std::uint64_t (*)(void* user);  // a random number, never 0

  Coordinator(std::uint64_t attempt, Draw draw, Log log, void* user) noexcept;
  ~Coordinator();
  Coordinator(const Coordinator&) = delete;
  Coordinator& operator=(const Coordinator&) = delete;

  void answer(const Request& request, std::uint64_t now_ms, Answer* answer) noexcept;

  /// Call after the answer to this request was sent. Until then its rank is awaited: if the process
  /// ended before, the answer would be lost.
  void note_sent(const Request& request) noexcept;

  /// Ends rounds at their limit. Call at least every second: a coordinator that was suspended
  /// through a limit cannot tell which ranks left, and its open rounds abstain.
  void look_at_clock(std::uint64_t now_ms) noexcept;

  /// Abstain in all open and future rounds: the process is about to end.
  void retire(std::uint64_t now_ms) noexcept;

  std::uint64_t incarnation() const noexcept { return incarnation_; }
  bool has_open_rounds() const noexcept { return num_open_ > 0; }
  /// Whether a rank still waits for an answer.
  bool is_awaited() const noexcept;
  int num_rounds() const noexcept { return num_rounds_; }

 private:
  friend struct Explored;  // the explorer, which tells states apart

  enum class State : std::uint8_t { kOpen, kAsking, kTable, kAbstain };
  struct Vote {
    std::uint64_t nonce;  // 0: a free slot
    bool confirmed;
    bool told;
  };
  struct Round;

  Round* find(const Request& request) noexcept;
  Round* begin(const Request& request, std::uint64_t now_ms) noexcept;
  static Vote* slot(const Round& round, std::uint64_t nonce) noexcept;
  void take_vote(Round* round, const Request& request, std::uint64_t now_ms) noexcept;
  void take_confirm(Round* round, const Request& request, std::uint64_t now_ms) noexcept;
  void tell(Round* round, const Request& request, std::uint64_t now_ms, Answer* answer) noexcept;
  void forget_votes(Round* round) noexcept;
  void decide(Round* round, State state, const char* reason, std::uint64_t now_ms) noexcept;
  std::uint64_t limit_of(const Round& round) const noexcept;

  std::uint64_t attempt_;
  std::uint64_t incarnation_;
  Draw draw_;
  Log log_;
  void* user_;
  Round* latest_ = nullptr;
  int num_rounds_ = 0;
  int num_open_ = 0;
  int num_with_votes_ = 0;
  int num_timeouts_ = 0;
  bool ids_repeat_ = false;
  bool is_retired_ = false;
  std::uint64_t looked_at_ms_ = 0;
};

}  // namespace dynamiccl
