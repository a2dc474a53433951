// The agreement of one communicator on this rank: clock, member, and on rank 0 the leader.
//
// Two parties hold a reference: the communicator (context.h), whose threads pass through the clock,
// and the service, whose single thread does everything else. The last one to release it frees it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "adaptive/agreement/artifact.h"
#include "adaptive/agreement/clock.h"
#include "adaptive/agreement/leader.h"
#include "adaptive/agreement/member.h"
#include "adaptive/agreement/settings.h"
#include "adaptive/service/network.h"

namespace dynamiccl {

struct CallRecord;
class Guard;
class Profiler;

inline constexpr std::size_t kLineBytes = 640;
/// Added to the message about a kill file that the ranks can no longer follow together.
inline constexpr char kNotOff[] =
    "; a kill file is there, but nothing can be agreed any more: the table stays in force";

class Agreement {
 public:
  Agreement(const Member::Place& place, Settings* settings) noexcept;
  ~Agreement();
  Agreement(const Agreement&) = delete;
  Agreement& operator=(const Agreement&) = delete;

  /// Null when out of memory. Takes ownership of `settings` in any case. The caller holds a
  /// reference.
  static Agreement* create(const Member::Place& place, Settings* settings) noexcept;
  Agreement* hold() noexcept {
    holders_.fetch_add(1, std::memory_order_relaxed);
    return this;
  }
  void let_go() noexcept;

  const Member::Place& place() const noexcept { return place_; }
  const Settings& settings() const noexcept { return *settings_; }
  bool is_leader() const noexcept { return place_.rank == 0; }
  Clock* clock() noexcept { return &clock_; }

  /// Leave a line for NCCL's logger, printed by the next call or finalize: NCCL's logger makes CUDA
  /// calls, which the agreement's thread must not make.
  __attribute__((format(printf, 2, 3))) void say(const char* format, ...) noexcept;
  /// The line that finalize prints if the agreement has not succeeded by then.
  __attribute__((format(printf, 2, 3))) void note(const char* format, ...) noexcept;
  bool take_note(char (&line)[kLineBytes]) noexcept;
  /// Takes the waiting line. Called by the communicator's threads.
  bool take_line(char (&line)[kLineBytes]) noexcept;

  /// Read the artifact, on the files' thread; comes before all functions below.
  void load() noexcept;

  // ---- all functions below are for the service's thread ----

  void begin(const Outlet& outlet, std::uint64_t now_ns) noexcept;
  void receive(std::int32_t from_rank, const Message& message, std::uint64_t now_ns) noexcept;
  void tick(std::uint64_t now_ns) noexcept;
  /// When tick() is due; 0: not before the next message.
  std::uint64_t due_ns(std::uint64_t now_ns) const noexcept;
  /// Whether nothing more can be agreed (or never could).
  bool has_ended() const noexcept { return ended_; }
  /// Whether the first decision was reached: on this rank and, for a leader, on all ranks.
  bool is_settled() const noexcept;
  /// End the agreement: on this rank alone, or on all ranks.
  void end(const char* reason) noexcept;

  /// Leader only: whether a kill file exists.
  void see_kill_file(bool is_there) noexcept { off_ = is_there; }

  /// Leader only: whether the index with this stamp should be read, and the result of reading it
  /// (takes ownership).
  bool wants_artifact(std::uint64_t stamp) noexcept;
  void take_artifact(Artifact* fresh) noexcept;

  Member* member() noexcept { return member_; }
  Leader* leader() const noexcept { return leader_; }
  Guard* guard() noexcept { return guard_; }
  const Artifact* artifact() const noexcept { return artifact_; }
  const char* identity() const noexcept { return identity_; }

  /// Propose a table to all ranks, without entries that the guard has withdrawn.
  bool propose(const std::uint8_t* table, std::size_t bytes) noexcept;

  /// Fill in a call record of this communicator (any thread).
  void describe(CallRecord* record) const noexcept;
  /// Leader only: whether the brain should be asked now, and its answer (`reason`: it failed; no
  /// bytes: keep the table).
  bool brain_is_due(std::uint64_t now_ns) noexcept;
  void brain_answered(const char* reason, const std::uint8_t* table, std::size_t bytes) noexcept;
  /// The latest proposed table; needs room for kMaxFileBytes.
  std::size_t copy_current(std::uint8_t* table) const noexcept;
  /// Counters for Metrics, in its order.
  std::uint64_t metric(int index) const noexcept;

  // Used by the service only.
  Agreement* next = nullptr;
  Connection** by_rank = nullptr;                  // [num_ranks]
  char (*addresses)[kAddressTextBytes] = nullptr;  // [num_ranks], with a coordinator
  int listener = -1;                               // local sockets
  bool has_address_of_leader = false;
  std::uint64_t connect_at_ns = 0;
  std::uint64_t connect_pause_ns = 0;
  bool begun = false;
  bool is_watched = false;           // its times are sent
  std::atomic<bool> closing{false};  // the communicator is gone
  std::uint64_t linger_until_ns = 0;
  std::atomic<Profiler*> profiler{nullptr};  // null: none, or the communicator is gone

 private:
  void announce() noexcept;
  void probe(std::uint64_t now_ns) noexcept;
  bool may_stop(std::uint64_t now_ns) const noexcept;
  void note_decision() noexcept;
  void note_missing() noexcept;

  std::atomic<std::int32_t> holders_{1};
  const Member::Place place_;
  Settings* const settings_;
  Clock clock_;

  Mutex line_mutex_;
  char line_[kLineBytes] = "";
  char note_[kLineBytes] = "";
  std::atomic<bool> has_line_{false};

  Member* member_ = nullptr;
  Leader* leader_ = nullptr;
  Guard* guard_ = nullptr;
  Artifact* artifact_ = nullptr;
  char identity_[kIdentityBytes] = "";
  bool ended_ = false;
  bool off_ = false;                 // a kill file is there
  bool is_told_off_ = false;         // and that has been put to the ranks
  std::uint32_t told_at_ = 0;        // to be said once so many proposals were agreed; 0: nothing is
  std::uint32_t told_of_ = 0;        // the latest decision that was spoken of
  std::uint64_t index_stamp_ = 0;    // of the artifact that was read
  std::uint64_t renewed_stamp_ = 0;  // of the one that is being read; 0: none is
  // The latest table proposed permanently; tables for probes and the guard are derived from it.
  std::uint8_t* current_ = nullptr;
  std::size_t current_bytes_ = 0;
  bool is_probing_ = false;
  std::uint64_t next_probe_call_ = 0;
  std::uint64_t began_ns_ = 0;
  std::uint64_t probe_began_ = 0;  // the call of the latest probe that was not accounted for; or 0
  std::uint64_t brain_at_ns_ = 0;
  std::uint64_t brain_saw_ = 0;
  bool brain_complained_ = false;
};

}  // namespace dynamiccl
