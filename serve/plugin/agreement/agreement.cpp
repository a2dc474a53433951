// Between the state machines, which know no artifact, and the service, which knows no tables.
#include "agreement/agreement.h"

#include <fcntl.h>
#include <linux/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

#include "agreement/guard.h"
#include "file.h"
#include "history/record.h"

namespace dynamiccl {
namespace {

constexpr std::uint64_t kSecond = 1'000'000'000;

const char* const kKnownBy[] = {"commId", "commHash", "launcher"};

template <typename T, typename... Arguments>
T* make(Arguments&&... arguments) noexcept {
  void* memory = std::malloc(sizeof(T));
  return memory != nullptr ? new (memory) T(arguments...) : nullptr;
}

template <typename T>
void unmake(T* object) noexcept {
  if (object == nullptr) return;
  object->~T();
  std::free(object);
}

/// Changes whenever another file stands at `path`; 0: there is none.
std::uint64_t stamp_of(const char* path) noexcept {
  struct statx facts;
  if (syscall(SYS_statx, AT_FDCWD, path, AT_SYMLINK_NOFOLLOW, STATX_BASIC_STATS, &facts) != 0) {
    return 0;
  }
  const std::uint64_t parts[] = {facts.stx_ino, facts.stx_size,
                                 static_cast<std::uint64_t>(facts.stx_mtime.tv_sec),
                                 facts.stx_mtime.tv_nsec};
  return fnv1a(reinterpret_cast<const std::uint8_t*>(parts), sizeof parts) | 1;
}

}  // namespace

Agreement::Agreement(const Member::Place& place, KnownBy known_by, Settings* settings) noexcept
    : place_(place),
      known_by_(known_by),
      settings_(settings),
      clock_(settings->limits, settings->activate_at) {}

Agreement::~Agreement() {
  Leader::destroy(leader_);
  Guard::destroy(guard_);
  unmake(member_);
  unmake(artifact_);
  unmake(settings_);
  std::free(current_);
  std::free(by_rank);
  std::free(addresses);
}

Agreement* Agreement::create(const Member::Place& place, KnownBy known_by,
                             Settings* settings) noexcept {
  void* memory = std::malloc(sizeof(Agreement));
  if (memory == nullptr) {
    unmake(settings);
    return nullptr;
  }
  return new (memory) Agreement(place, known_by, settings);
}

void Agreement::let_go() noexcept {
  if (holders_.fetch_sub(1, std::memory_order_acq_rel) == 1) unmake(this);
}

void Agreement::say(const char* format, ...) noexcept {
  {
    const Lock lock(&line_mutex_);
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(line_, sizeof line_, format, arguments);
    va_end(arguments);
    note_[0] = '\0';
    has_line_.store(true, std::memory_order_release);
  }
  clock_.call_in();
}

void Agreement::note(const char* format, ...) noexcept {
  const Lock lock(&line_mutex_);
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(note_, sizeof note_, format, arguments);
  va_end(arguments);
}

bool Agreement::take_note(char (&line)[kLineBytes]) noexcept {
  const Lock lock(&line_mutex_);
  std::memcpy(line, note_, sizeof line);
  note_[0] = '\0';
  return line[0] != '\0';
}

bool Agreement::take_line(char (&line)[kLineBytes]) noexcept {
  if (!has_line_.load(std::memory_order_acquire)) return false;
  const Lock lock(&line_mutex_);
  std::memcpy(line, line_, sizeof line);
  has_line_.store(false, std::memory_order_relaxed);
  return true;
}

void Agreement::begin(const Outlet& outlet, std::uint64_t now_ns) noexcept {
  begun = true;
  const auto count = static_cast<std::size_t>(place_.num_ranks);
  artifact_ = make<Artifact>();
  member_ = make<Member>(place_, &clock_, outlet, settings_->timing);
  by_rank = static_cast<Connection**>(std::calloc(count, sizeof *by_rank));
  addresses = static_cast<decltype(addresses)>(std::calloc(count, sizeof *addresses));
  bool whole = artifact_ != nullptr && member_ != nullptr && by_rank != nullptr;
  whole = whole && addresses != nullptr;
  if (whole) {
    artifact_->load(*settings_, place_);
    artifact_->write_identity(*settings_, place_, kKnownBy[static_cast<int>(known_by_)], identity_);
  }
  if (whole && is_leader()) {
    leader_ = Leader::create(place_, &clock_, identity_, outlet, settings_->timing, now_ns);
    guard_ = Guard::create(place_.num_ranks);
    whole = leader_ != nullptr && guard_ != nullptr;
  }
  if (!whole) return end("memory is short");
  if (!is_leader()) {
    return note(
        "DYNAMICCL: %d ranks on %d nodes: NCCL's own choice stood: nothing was agreed with "
        "rank 0 by the end",
        place_.num_ranks, place_.num_nodes);
  }
  char path[4200];
  std::snprintf(path, sizeof path, "%s/plugin.index",
                settings_->artifact != nullptr ? settings_->artifact : "");
  index_stamp_ = stamp_of(path);
  if (artifact_->problem() == nullptr) {
    propose(artifact_->table(), artifact_->table_bytes());
    next_probe_call_ = settings_->probe_calls;
  }
  Message hello{};
  hello.kind = MessageKind::kHello;
  hello.comm_id = place_.comm_id;
  hello.rank = 0;
  hello.body = reinterpret_cast<const std::uint8_t*>(identity_);
  hello.body_bytes = static_cast<std::uint32_t>(std::strlen(identity_));
  leader_->receive(0, hello, now_ns);
  note_missing();
}

/// The first rank that has not come, should it never.
void Agreement::note_missing() noexcept {
  if (leader_->state() != Leader::State::kGathering) return;
  note("DYNAMICCL: %d ranks on %d nodes: NCCL's own choice stood: rank %d did not take part",
       place_.num_ranks, place_.num_nodes, leader_->first_missing());
}

bool Agreement::propose(const std::uint8_t* table, std::size_t bytes) noexcept {
  std::uint8_t* copy = nullptr;
  if (bytes > 0) {
    copy = static_cast<std::uint8_t*>(std::malloc(bytes));
    if (copy == nullptr) return false;
    std::memcpy(copy, table, bytes);
  }
  const bool is_first = leader_->committed() == 0;
  const std::uint64_t at = is_first ? settings_->activate_at : Clock::kNever;
  const bool taken =
      (bytes == 0 || guard_->withdraw_from(copy, bytes)) && leader_->propose(copy, bytes, false, at);
  if (taken) {
    std::free(current_);
    current_ = copy;
    current_bytes_ = bytes;
    is_probing_ = false;
  } else {
    std::free(copy);
  }
  return taken;
}

void Agreement::end(const char* reason) noexcept {
  if (ended_) return;
  ended_ = true;
  if (member_ != nullptr) member_->leave();
  clock_.release_hold();
  if (told_of_ == 0) {
    say("DYNAMICCL: %d ranks on %d nodes: NCCL's own choice stands: %s", place_.num_ranks,
        place_.num_nodes, reason);
  } else {
    say("DYNAMICCL: %d ranks on %d nodes: no table after this one: %s", place_.num_ranks,
        place_.num_nodes, reason);
  }
}

void Agreement::receive(std::int32_t from_rank, const Message& message,
                        std::uint64_t now_ns) noexcept {
  if (member_ == nullptr) return;
  if (message.kind == MessageKind::kRefuse && from_rank == 0) {
    char reason[256];
    const int length = static_cast<int>(message.body_bytes < 255 ? message.body_bytes : 255);
    std::snprintf(reason, sizeof reason, "%.*s", length,
                  reinterpret_cast<const char*>(message.body));
    return end(reason);
  }
  member_->receive(from_rank, message, now_ns);
  if (leader_ == nullptr) return note_decision();
  if (message.kind == MessageKind::kRequest) {
    // A rank says so as long as it sees a kill file.
    off_ = true;
    off_until_ns_ = now_ns + 3 * settings_->look_interval_ns + kSecond;
  } else if (message.kind == MessageKind::kSamples) {
    for (std::uint32_t at = 0; at + kSampleBytes <= message.body_bytes; at += kSampleBytes) {
      guard_->take(read_sample(message.body + at));
    }
  } else {
    leader_->receive(from_rank, message, now_ns);
    if (message.kind == MessageKind::kHello) note_missing();
  }
  note_decision();
  announce(now_ns);
}

void Agreement::tick(std::uint64_t now_ns) noexcept {
  if (member_ == nullptr) return;
  member_->tick(now_ns);
  note_decision();
  if (leader_ == nullptr) return;
  leader_->tick(now_ns);
  announce(now_ns);
  if (leader_->is_settled() && !ended_) probe(now_ns);
}

/// A leader: what is to follow from the state of things.
void Agreement::announce(std::uint64_t now_ns) noexcept {
  if (leader_->state() == Leader::State::kEnded) return end(leader_->reason());
  const bool all_here = leader_->state() != Leader::State::kGathering;
  if (all_here && artifact_->problem() != nullptr && leader_->committed() == 0 && !ended_) {
    return end(artifact_->problem());  // the same on all ranks, else they would have differed
  }
  if (off_ && now_ns >= off_until_ns_) off_ = false;
  if (off_ == is_told_off_ || !leader_->is_settled() || ended_) return;
  const bool is_put = off_ ? leader_->propose(nullptr, 0, false, Clock::kNever)
                           : leader_->propose(current_, current_bytes_, false, Clock::kNever);
  if (!is_put) return;
  is_told_off_ = off_;
  is_probing_ = false;
  say("DYNAMICCL: %d ranks on %d nodes: %s", place_.num_ranks, place_.num_nodes,
      off_ ? "a kill file is there: back to NCCL's own choice"
           : "the kill file is gone: back to the table");
}

/// Says once what every first decision is; later ones speak when they are something else.
void Agreement::note_decision() noexcept {
  const std::uint32_t decided = member_->decided();
  if (decided == told_of_) return;
  const bool is_first = told_of_ == 0;
  if (clock_.table_number() == 0) return;
  told_of_ = decided;
  if (!is_first) return;
  char hash[2 * kDigestBytes + 1];
  to_hex(artifact_->hash(), kDigestBytes, hash);
  hash[12] = '\0';
  say("DYNAMICCL: %d ranks on %d nodes: decisions of %s (artifact %s, system %s, mode %s; %d of %d "
      "bins decided) since call %llu%s",
      place_.num_ranks, place_.num_nodes, settings_->artifact, hash, artifact_->system(),
      name_of(settings_->mode), artifact_->num_decided(), artifact_->num_entries(),
      static_cast<unsigned long long>(member_->decided_at()),
      settings_->mode == Mode::kAdaptive
          ? "; results are not bitwise the same from run to run, as tables change with the network"
          : "");
}

/// Nothing else is under way: judge what was measured, or measure NCCL's own choice for a moment.
void Agreement::probe(std::uint64_t) noexcept {
  if (is_probing_) {
    // It began at a call that all ranks stopped at; back after so many, at another such call.
    if (clock_.calls() < member_->decided_at() + kProbeSpan) return;
    is_probing_ = !leader_->propose(current_, current_bytes_, false, Clock::kNever);
    return;
  }
  if (settings_->probe_calls == 0 || current_bytes_ == 0 || off_) return;
  Guard::Slow slow;
  if (const int found = guard_->find_slow(*artifact_, &slow)) {
    say("DYNAMICCL: %d ranks on %d nodes: %d choices withdrawn: collective %d around bin %d took "
        "%.1f us, NCCL's own %.1f us",
        place_.num_ranks, place_.num_nodes, found, slow.collective, slow.bin, slow.our_us,
        slow.own_us);
    std::uint8_t table[kMaxFileBytes];
    std::memcpy(table, current_, current_bytes_);
    propose(table, current_bytes_);
    return;
  }
  if (guard_->complete() == 0 || clock_.calls() < next_probe_call_) return;
  if (!leader_->propose(nullptr, 0, true, Clock::kNever)) return;
  is_probing_ = true;
  next_probe_call_ = clock_.calls() + settings_->probe_calls;
}

void Agreement::describe(CallRecord* record) const noexcept {
  const TableInForce& table = clock_.in_force();
  record->table = table.number;
  const Entry* entry = lookup(table.decisions, record->collective, record->size_bytes);
  record->decided = entry != nullptr &&
                    (entry->algorithm == kAuto || entry->algorithm == record->algorithm) &&
                    (entry->protocol == kAuto || entry->protocol == record->protocol);
  if (clock_.is_probing()) record->flags |= kFlagProbe;
}

bool Agreement::brain_is_due(std::uint64_t now_ns) noexcept {
  if (settings_->mode != Mode::kAdaptive || leader_ == nullptr || ended_ || off_) return false;
  if (!leader_->is_settled() || leader_->committed() == 0 || now_ns < brain_at_ns_) return false;
  if (guard_->complete() == brain_saw_) return false;  // it knows all that yet
  brain_at_ns_ = now_ns + settings_->adapt_interval_ns;
  brain_saw_ = guard_->complete();
  return true;
}

void Agreement::brain_answered(const char* reason, const std::uint8_t* table,
                               std::size_t bytes) noexcept {
  if (reason != nullptr) {
    if (!brain_complained_) {
      say("DYNAMICCL: %d ranks on %d nodes: the brain gave no table, the one in force stays: %s",
          place_.num_ranks, place_.num_nodes, reason);
    }
    brain_complained_ = true;
    return;
  }
  if (bytes == 0 || ended_ || off_ || !leader_->is_settled()) return;
  auto* decoded = static_cast<DecisionTable*>(std::malloc(sizeof(DecisionTable)));
  if (decoded == nullptr) return;
  const char* problem = decode_table(table, bytes, decoded);
  const bool fits = problem == nullptr && decoded->num_ranks == place_.num_ranks &&
                    decoded->num_nodes == place_.num_nodes;
  std::free(decoded);
  if (fits) {
    propose(table, bytes);
  } else {
    brain_answered(problem != nullptr ? problem : "its table is for another communicator", table,
                   bytes);
  }
}

std::size_t Agreement::copy_current(std::uint8_t* table) const noexcept {
  if (current_bytes_ > 0) std::memcpy(table, current_, current_bytes_);
  return current_bytes_;
}

std::uint64_t Agreement::metric(int index) const noexcept {
  const bool leads = leader_ != nullptr && guard_ != nullptr;
  switch (index) {
    case 0:
      return clock_.calls();
    case 1:
      return clock_.table_number();
    case 2:
      return ended_ ? 1 : 0;
    case 3:
      return off_ ? 1 : 0;
    case 4:
      return clock_.is_waiting() ? 1 : 0;
    case 5:
      return clock_.is_broken() ? 1 : 0;
    case 6:
      return leads ? leader_->committed() : 0;
    case 7:
      return leads ? guard_->complete() : 0;
    case 8:
      return leads ? static_cast<std::uint64_t>(guard_->num_withdrawn()) : 0;
    default:
      return 0;
  }
}

std::uint64_t Agreement::due_ns(std::uint64_t now_ns) const noexcept {
  std::uint64_t due = 0;
  const auto earlier = [&due](std::uint64_t other) {
    if (other != 0 && (due == 0 || other < due)) due = other;
  };
  if (member_ != nullptr) earlier(member_->due_ns());
  if (leader_ != nullptr) {
    earlier(leader_->due_ns());
    if (leader_->is_settled() && !ended_ && settings_->mode != Mode::kTableStatic) {
      earlier(now_ns + kSecond / 5);
    }
  }
  return due;
}

bool Agreement::is_settled() const noexcept {
  if (ended_) return true;
  if (leader_ != nullptr) return leader_->is_settled() && leader_->committed() > 0;
  return member_ != nullptr && member_->decided() != 0 && !member_->is_mustered();
}

void Agreement::look_for_artifact(std::uint64_t now_ns) noexcept {
  if (leader_ == nullptr || ended_ || off_ || settings_->artifact == nullptr) return;
  if (!leader_->is_settled() || leader_->committed() == 0) return;
  char path[4200];
  std::snprintf(path, sizeof path, "%s/plugin.index", settings_->artifact);
  const std::uint64_t stamp = stamp_of(path);
  if (stamp == index_stamp_ || stamp == 0) return;
  auto* fresh = make<Artifact>();
  if (fresh == nullptr) return;
  fresh->load(*settings_, place_);
  index_stamp_ = stamp;
  char hash[2 * kDigestBytes + 1];
  to_hex(fresh->hash(), kDigestBytes, hash);
  hash[12] = '\0';
  if (fresh->problem() != nullptr) {
    say("DYNAMICCL: %d ranks on %d nodes: the new artifact is refused, the old one stays: %s",
        place_.num_ranks, place_.num_nodes, fresh->problem());
    return unmake(fresh);
  }
  guard_->forget();
  if (propose(fresh->table(), fresh->table_bytes())) {
    say("DYNAMICCL: %d ranks on %d nodes: a new artifact (%s) is put to the ranks",
        place_.num_ranks, place_.num_nodes, hash);
    unmake(artifact_);
    artifact_ = fresh;
  } else {
    index_stamp_ = 0;  // once more
    unmake(fresh);
  }
  (void)now_ns;
}

}  // namespace dynamiccl
