// One rank's part in its communicator's agreement; see rules.h. No sockets and no clock on the
// wall: it is told what came and what time it is.
#pragma once

#include <cstdint>

#include "agreement/clock.h"
#include "agreement/rules.h"

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

  /// A message of the leader (`from_rank` 0) or of a peer.
  void receive(std::int32_t from_rank, const Message& message, std::uint64_t now_ns) noexcept;
  void tick(std::uint64_t now_ns) noexcept;

  /// Take part in no further proposal. One that was voted on is still followed.
  void leave() noexcept { left_ = true; }

  bool has_voted() const noexcept { return voted_ != 0; }
  bool has_left() const noexcept { return left_; }
  /// The latest proposal whose outcome this rank knows.
  std::uint32_t decided() const noexcept { return decided_; }
  /// From which call on.
  std::uint64_t decided_at() const noexcept { return decided_at_; }
  /// When tick() is due although nothing came; 0: never.
  std::uint64_t due_ns() const noexcept { return voted_ != 0 ? ask_at_ns_ : 0; }

 private:
  friend struct Inspect;
  static constexpr std::int32_t kAskedAtOnce = 16;

  void vote(const Message& proposal, std::uint64_t now_ns) noexcept;
  Reason consider(const Message& proposal) noexcept;
  void learn(const Message& decision) noexcept;
  void acknowledge() noexcept;
  void tell(std::int32_t peer, std::uint32_t proposal) noexcept;
  void ask(std::uint64_t now_ns) noexcept;
  Message about(MessageKind kind, std::uint32_t proposal) const noexcept;
  void send(std::int32_t to_rank, const Message& message) noexcept {
    outlet_.send(outlet_.user, to_rank, message);
  }
  bool is_past() const noexcept;

  const Place place_;
  Clock* const clock_;
  const Outlet outlet_;
  const Timing timing_;

  bool left_ = false;
  std::uint32_t refused_ = 0;  // never to be voted for: this proposal and all before it
  std::uint32_t voted_ = 0;    // the proposal voted for, and undecided; 0: none
  std::uint64_t voted_at_ = 0;
  std::uint64_t voted_span_ = 0;
  std::uint64_t voted_fixed_ = Clock::kNever;
  TableInForce* proposed_ = nullptr;  // the table voted for
  std::uint64_t ask_at_ns_ = 0;
  std::int32_t next_peer_ = 0;

  std::uint32_t decided_ = 0;
  bool committed_ = false;  // what was decided
  bool told_past_ = false;
  std::uint64_t decided_at_ = 0;
  std::uint64_t decided_span_ = 0;
};

}  // namespace dynamiccl
