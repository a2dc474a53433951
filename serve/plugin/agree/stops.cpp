// Implementation of stops.h.
#include "agree/stops.h"

#include <algorithm>

namespace dynamiccl {
namespace {

// After each failure in a row the next stop is further away, and patience is longer: these double
// at most so many times.
constexpr std::uint32_t kFurtherTimes = 14, kMorePatienceTimes = 3;
/// Indices and spans beyond this are no calls that a job could make.
constexpr std::uint64_t kMostCalls = std::uint64_t{1} << 48;

std::uint64_t mixed(std::uint64_t before, std::uint64_t number) noexcept {
  const std::uint64_t product = (before ^ number) * 0x9e3779b97f4a7c15U;
  return product ^ product >> 32;
}

}  // namespace

Stops::Stops(std::uint64_t comm_id, const DecisionTable* table, const Reply& agreed) noexcept
    : comm_id_(comm_id), last_table_(table), table_(table) {
  Reply begin = agreed;
  begin.change = Change::kNothing;
  this->agreed(begin, nullptr);
}

/// Shifted by a hash of the communicator's id, and another one each time: two communicators that
/// ranks call in opposite order would else wait for each other at each of their stops.
void Stops::go_to(std::uint64_t earliest, std::uint64_t width) noexcept {
  earliest_ = earliest;
  at_ = earliest + mixed(mixed(0, comm_id_), number_) % width;
}

void Stops::answered(int collective, std::uint64_t size_bytes, std::uint64_t marks) noexcept {
  ++calls_;
  digest_ = mixed(mixed(mixed(digest_, static_cast<std::uint64_t>(collective)), size_bytes), marks);
}

std::uint64_t Stops::patience_ms(const Limits& limits) const noexcept {
  return limits.patience_ms << std::min(failures_, kMorePatienceTimes);
}

void Stops::write_vote(Vote* vote) const noexcept {
  vote->round.comm = comm_id_;
  vote->round.number = number_;
  for (std::uint64_t& field : vote->fields) field = 0;
  vote->fields[0] = digest_;
  vote->fields[1] = calls_ + 1;
}

void Stops::agreed(const Reply& proposal, const DecisionTable* table) noexcept {
  if (proposal.change == Change::kNewTable) last_table_ = table;
  table = proposal.change == Change::kOwnChoice ? nullptr : last_table_;
  if (proposal.change != Change::kNothing) __atomic_store_n(&table_, table, __ATOMIC_RELEASE);
  ++number_;
  failures_ = 0;
  span_calls_ = std::clamp<std::uint64_t>(proposal.span_calls, 1, kMostCalls);
  at_ = kNever;
  if (proposal.next_stop == 0 || proposal.next_stop > kMostCalls) return;
  go_to(proposal.next_stop, span_calls_);
}

void Stops::failed() noexcept {
  ++number_;
  ++failures_;
  if (failures_ == kMostFailures) {
    at_ = kNever;
    return;
  }
  const std::uint64_t width = span_calls_ << std::min(failures_ - 1, kFurtherTimes);
  go_to(earliest_ + width, width);
}

}  // namespace dynamiccl
