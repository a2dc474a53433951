// One rank's side of its communicator's agreement; see rules.h. No sockets and no system clock:
// messages and times are arguments.
#pragma once

#include <cstdint>

#include "adaptive/agreement/clock.h"
#include "adaptive/agreement/rules.h"

namespace dynamiccl {

class Member {
 public:
  struct Place {
    std::uint64_t comm_id;
    std::int32_t rank;
    std::int32_t num_ranks;
    std::int32_t num_nodes;
  };

  Member(const Place& place, Clock* clock, const Outlet& outlet, const Timing& timing) noexcept;
  ~Member();
  Member(const Member&) = delete;
  Member& operator=(const Member&) = delete;

  /// Handle a message of the leader (`from_rank` 0) or of a peer.
  void receive(std::int32_t from_rank, const Message& message, std::uint64_t now_ns) noexcept;
  void tick(std::uint64_t now_ns) noexcept;

  /// Join no further proposal. The outcome of one that was voted on is still followed.
  void leave() noexcept { left_ = true; }

  /// Whether the rank will stop at a call, or waits there.
  bool is_preparing() const noexcept { return proposal_ != 0; }
  /// The latest proposal with a known outcome, and the call from which on it holds.
  std::uint32_t decided() const noexcept { return decided_; }
  std::uint64_t decided_at() const noexcept { return decided_at_; }
  /// When tick() is due without a message; 0: never.
  std::uint64_t due_ns() const noexcept { return promised_ ? ask_at_ns_ : 0; }

 private:
  friend struct Inspect;

  void stop_for(const Message& proposal) noexcept;
  Reason consider(const Message& proposal) noexcept;
  void promise(std::uint64_t now_ns) noexcept;
  void say_yes() noexcept;
  void drop_out() noexcept;
  void learn(const Message& decision) noexcept;
  void acknowledge(std::uint32_t proposal) noexcept;
  void tell(std::int32_t peer, std::uint32_t proposal) noexcept;
  void ask(std::uint64_t now_ns) noexcept;
  Message about(MessageKind kind, std::uint32_t proposal) const noexcept;
  void send(std::int32_t to_rank, const Message& message) noexcept {
    outlet_.send(outlet_.user, to_rank, message);
  }

  const Place place_;
  Clock* const clock_;
  const Outlet outlet_;
  const Timing timing_;

  bool left_ = false;
  std::uint32_t refused_ = 0;   // never to be said yes to: this proposal and all before it
  std::uint32_t proposal_ = 0;  // the one whose call is stopped at; 0: none
  std::uint64_t at_ = 0;
  bool promised_ = false;  // has said yes
  std::uint64_t hash_ = 0;
  TableInForce* proposed_ = nullptr;
  std::uint64_t ask_at_ns_ = 0;

  std::uint32_t decided_ = 0;
  bool committed_ = false;  // what was decided
  std::uint64_t decided_at_ = 0;
};

}  // namespace dynamiccl
