// The coordinator's side of the agreement: a state machine without sockets, clocks or threads.
//
// A round is one communicator. It is open until as many ranks as it has have voted alike; then all
// are asked whether they are still here, which a vote of an `init` that was aborted does not
// answer; then all get the table. Anything else, and the limit, which counts from the first vote,
// makes it abstain, for all of them and for whoever comes later. What was decided stays so, and is
// answered as long as the process lives: a table to whoever confirms the round's question, a random
// number that its own ranks alone were asked. So who voted need not be kept for that.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tuner/message.h"

namespace dynamiccl {

class Coordinator {
 public:
  /// What the log is told of a round that was decided.
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

  /// The answer to this request has been sent. Until then its rank is awaited: a process that ended
  /// between the two would take the answer with it.
  void note_sent(const Request& request) noexcept;

  /// Ends rounds whose time is over. To be called at least every second: a coordinator that slept
  /// through a limit cannot tell who has gone meanwhile, and its open rounds abstain.
  void look_at_clock(std::uint64_t now_ms) noexcept;

  /// Ends all open rounds, and those to come: the process ends, and its answers with it.
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
