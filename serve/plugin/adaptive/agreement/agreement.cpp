//
// Connects the state machines (clock, member, leader) with artifact files and tables.
#include "adaptive/agreement/agreement.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

#include "adaptive/agreement/guard.h"
#include "adaptive/service/files.h"
#include "platform/allocate.h"
#include "profiler/record.h"

namespace dynamiccl {
namespace {

constexpr std::uint64_t kSecond = 1'000'000'000;

}  // namespace

Agreement::Agreement(const Member::Place& place, Settings* settings) noexcept
    : place_(place), settings_(settings), clock_(settings->decision_limit_ns) {}

Agreement::~Agreement() {
  Leader::destroy(leader_);
  Guard::destroy(guard_);
  deallocate(member_);
  deallocate(artifact_);
  deallocate(settings_);
  std::free(current_);
  std::free(by_rank);
  std::free(addresses);
}

Agreement* Agreement::create(const Member::Place& place, Settings* settings) noexcept {
  void* memory = std::malloc(sizeof(Agreement));
  if (memory == nullptr) {
    deallocate(settings);
    return nullptr;
  }
  return new (memory) Agreement(place, settings);
}

void Agreement::let_go() noexcept {
  if (holders_.fetch_sub(1, std::memory_order_acq_rel) == 1) deallocate(this);
}

void Agreement::load() noexcept {
  index_stamp_ = stamp_of_index(settings_->artifact);
  artifact_ = allocate<Artifact>();
  if (artifact_ != nullptr) artifact_->load(*settings_, place_);
}

void Agreement::begin(const Outlet& outlet, std::uint64_t now_ns) noexcept {
  begun = true;
  began_ns_ = now_ns;
  const auto count = static_cast<std::size_t>(place_.num_ranks);
  member_ = allocate<Member>(place_, &clock_, outlet, settings_->timing);
  by_rank = static_cast<Connection**>(std::calloc(count, sizeof *by_rank));
  addresses = static_cast<decltype(addresses)>(std::calloc(count, sizeof *addresses));
  bool whole = artifact_ != nullptr && member_ != nullptr && by_rank != nullptr;
  whole = whole && addresses != nullptr;
  if (whole) artifact_->write_identity(place_, identity_);
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

void Agreement::end(const char* reason) noexcept {
  if (ended_) return;
  ended_ = true;
  if (member_ != nullptr) member_->leave();
  if (told_of_ == 0) {
    say("DYNAMICCL: %d ranks on %d nodes: NCCL's own choice stands: %s", place_.num_ranks,
        place_.num_nodes, reason);
  } else {
    say("DYNAMICCL: %d ranks on %d nodes: no table after this one: %s%s", place_.num_ranks,
        place_.num_nodes, reason, off_ && clock_.table_number() != 0 ? kNotOff : "");
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
  if (message.kind == MessageKind::kSamples) {
    for (std::uint32_t at = 0; at + kSampleBytes <= message.body_bytes; at += kSampleBytes) {
      guard_->take(read_sample(message.body + at));
    }
  } else {
    leader_->receive(from_rank, message, now_ns);
    if (message.kind == MessageKind::kHello) note_missing();
  }
  note_decision();
  announce();
}

void Agreement::tick(std::uint64_t now_ns) noexcept {
  if (member_ == nullptr) return;
  member_->tick(now_ns);
  note_decision();
  if (leader_ == nullptr) return;
  leader_->tick(now_ns);
  announce();
  if (leader_->is_settled() && !ended_) probe(now_ns);
}

void Agreement::describe(CallRecord* record) const noexcept {
  // CUDA launches a graph from a thread of its own, so its events come there.
  const Clock::Look look(clock_);
  const TableInForce& table = look.table();
  record->table = table.number;
  const Entry* entry = lookup(table.decisions, record->collective, record->size_bytes);
  record->decided = entry != nullptr &&
                    (entry->algorithm == kAuto || entry->algorithm == record->algorithm) &&
                    (entry->protocol == kAuto || entry->protocol == record->protocol);
  if (table.is_probe) record->flags |= kFlagProbe;
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
    case 9:
      return clock_.captured_calls();
    case 10:
      return clock_.waited_ns() / 1000;
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
    if (leader_->is_settled() && !ended_) earlier(now_ns + kSecond / 5);
  }
  return due;
}

bool Agreement::is_settled() const noexcept {
  if (ended_) return true;
  if (leader_ != nullptr) return leader_->is_settled() && leader_->committed() > 0;
  // A proposal that was abandoned counts as decided, and another one will follow.
  return member_ != nullptr && member_->decided_at() != 0 && !member_->is_preparing();
}

}  // namespace dynamiccl
