// One communicator of this rank: its clock, its part in the agreement, and what people are told.
//
// Two hold it: the communicator (context.h), whose threads pass through the clock, and the service,
// whose one thread does all the rest. It is freed by whoever lets go of it last.
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
/// What is said beside a kill file that the ranks cannot follow any more.
inline constexpr char kNotOff[] =
    "; a kill file is there, but nothing can be agreed any more: the table stays in force";

class Agreement {
 public:
  Agreement(const Member::Place& place, Settings* settings) noexcept;
  ~Agreement();
  Agreement(const Agreement&) = delete;
  Agreement& operator=(const Agreement&) = delete;

  /// Null when memory is short. Takes `settings` over in any case. The caller holds it.
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

  /// Leave a line for NCCL's logger: the next call, or finalize, says it, since NCCL's logger makes
  /// CUDA calls that the agreement's thread must not make.
  __attribute__((format(printf, 2, 3))) void say(const char* format, ...) noexcept;
  /// What finalize is to say should nothing have come of the agreement by then.
  __attribute__((format(printf, 2, 3))) void note(const char* format, ...) noexcept;
  bool take_note(char (&line)[kLineBytes]) noexcept;
  /// The line that waits, once. Called by the communicator's threads.
  bool take_line(char (&line)[kLineBytes]) noexcept;

  /// Read the artifact, on the files' thread, before all that follows.
  void load() noexcept;

  // ---- all below is the service's thread's ----

  void begin(const Outlet& outlet, std::uint64_t now_ns) noexcept;
  void receive(std::int32_t from_rank, const Message& message, std::uint64_t now_ns) noexcept;
  void tick(std::uint64_t now_ns) noexcept;
  /// When tick() is next due; 0: only when something comes.
  std::uint64_t due_ns(std::uint64_t now_ns) const noexcept;
  /// Nothing more can be agreed (or never could).
  bool has_ended() const noexcept { return ended_; }
  /// What had to be agreed has been, on this rank and, on a leader's, on all.
  bool is_settled() const noexcept;
  /// No more agreeing: of this rank alone, or with it of all.
  void end(const char* reason) noexcept;

  /// A leader's: whether a kill file is there.
  void see_kill_file(bool is_there) noexcept { off_ = is_there; }

  /// A leader's: whether the index with this stamp is to be read; and what was read then, which is
  /// taken over.
  bool wants_artifact(std::uint64_t stamp) noexcept;
  void take_artifact(Artifact* fresh) noexcept;

  Member* member() noexcept { return member_; }
  Leader* leader() const noexcept { return leader_; }
  Guard* guard() noexcept { return guard_; }
  const Artifact* artifact() const noexcept { return artifact_; }
  const char* identity() const noexcept { return identity_; }

  /// Put a table to the ranks, without what the guard has withdrawn.
  bool propose(const std::uint8_t* table, std::size_t bytes) noexcept;

  /// Complete a record of this communicator; on any thread.
  void describe(CallRecord* record) const noexcept;
  /// A leader's: whether to ask the brain now; and what it said (`reason`: it
  /// failed; no bytes: keep the table).
  bool brain_is_due(std::uint64_t now_ns) noexcept;
  void brain_answered(const char* reason, const std::uint8_t* table, std::size_t bytes) noexcept;
  /// The table that was put last, into room for kMaxFileBytes.
  std::size_t copy_current(std::uint8_t* table) const noexcept;
  /// Counters for Metrics, in its order.
  std::uint64_t metric(int index) const noexcept;

  // The service's own, kept here for it.
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
  // What the leader put last for good: tables for probes and the guard begin with it.
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
