// What a leader proposes: tables, NCCL's own choice after a kill file, probes, tables without
// withdrawn entries, the brain's decisions, and new artifacts.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "adaptive/agreement/agreement.h"
#include "adaptive/agreement/guard.h"
#include "platform/allocate.h"

namespace dynamiccl {

bool Agreement::propose(const std::uint8_t* table, std::size_t bytes) noexcept {
  std::uint8_t* copy = nullptr;
  if (bytes > 0) {
    copy = static_cast<std::uint8_t*>(std::malloc(bytes));
    if (copy == nullptr) return false;
    std::memcpy(copy, table, bytes);
  }
  const bool taken =
      (bytes == 0 || guard_->withdraw_from(copy, bytes)) && leader_->propose(copy, bytes, false);
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

/// Leader only: decides on the next proposal.
void Agreement::announce() noexcept {
  if (leader_->state() == Leader::State::kEnded && !ended_) return end(leader_->reason());
  const bool all_here = leader_->state() != Leader::State::kGathering;
  if (all_here && artifact_->problem() != nullptr && leader_->committed() == 0 && !ended_) {
    return end(artifact_->problem());  // the same on all ranks, else they would have differed
  }
  if (told_at_ != 0 && leader_->committed() >= told_at_) {
    told_at_ = 0;
    say("DYNAMICCL: %d ranks on %d nodes: %s", place_.num_ranks, place_.num_nodes,
        is_told_off_ ? "a kill file is there: back to NCCL's own choice"
                     : "the kill file is gone: back to the table");
  }
  if (off_ == is_told_off_) return;
  if (ended_ && off_) {
    is_told_off_ = true;
    if (clock_.table_number() == 0) return;  // it is NCCL's own choice
    return say("DYNAMICCL: %d ranks on %d nodes%s", place_.num_ranks, place_.num_nodes, kNotOff);
  }
  if (ended_ || !leader_->is_settled()) return;
  const bool is_put = off_ ? leader_->propose(nullptr, 0, false)
                           : leader_->propose(current_, current_bytes_, false);
  if (!is_put) return;
  is_told_off_ = off_;
  told_at_ = leader_->committed() + 1;
  is_probing_ = false;
}

/// Whether the stop budget allows one more optional stop (probes, the brain's decisions). The first
/// table, kill files and new artifacts are proposed in any case.
bool Agreement::may_stop(std::uint64_t now_ns) const noexcept {
  return leader_->waited_ns() / 1000 * 1'000'000 <=
         (now_ns - began_ns_) / 1000 * settings_->stop_ppm;
}

/// No proposal is running: judge the measured times, or start a probe of NCCL's own choice.
void Agreement::probe(std::uint64_t now_ns) noexcept {
  if (is_probing_) {
    // The probe began at a call where all ranks stopped, and ends at the next possible stop.
    probe_began_ = member_->decided_at();
    is_probing_ = !leader_->propose(current_, current_bytes_, false);
    return;
  }
  if (probe_began_ != 0) {
    // Its length cannot be chosen; the time to the next one can.
    const std::uint64_t took = member_->decided_at() - probe_began_;
    const std::uint64_t pause = took * settings_->probe_calls / kProbeCalls;
    next_probe_call_ = member_->decided_at() + std::max(settings_->probe_calls, pause);
    probe_began_ = 0;
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
  if (guard_->complete() == 0 || clock_.calls() < next_probe_call_ || !may_stop(now_ns)) return;
  is_probing_ = leader_->propose(nullptr, 0, true);
}

bool Agreement::brain_is_due(std::uint64_t now_ns) noexcept {
  if (leader_ == nullptr || ended_ || off_) return false;
  if (!leader_->is_settled() || leader_->committed() == 0 || now_ns < brain_at_ns_) return false;
  if (guard_->complete() == brain_saw_) return false;  // it knows all that yet
  if (!may_stop(now_ns)) return false;
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

bool Agreement::wants_artifact(std::uint64_t stamp) noexcept {
  if (leader_ == nullptr || ended_ || off_ || renewed_stamp_ != 0) return false;
  if (!leader_->is_settled() || leader_->committed() == 0) return false;
  if (stamp == index_stamp_ || stamp == 0) return false;
  renewed_stamp_ = stamp;
  return true;
}

void Agreement::take_artifact(Artifact* fresh) noexcept {
  const std::uint64_t stamp = renewed_stamp_;
  renewed_stamp_ = 0;
  if (fresh == nullptr || ended_) return deallocate(fresh);
  if (fresh->problem() != nullptr) {
    index_stamp_ = stamp;
    say("DYNAMICCL: %d ranks on %d nodes: the new artifact is refused, the old one stays: %s",
        place_.num_ranks, place_.num_nodes, fresh->problem());
    return deallocate(fresh);
  }
  guard_->forget();
  if (off_ || !propose(fresh->table(), fresh->table_bytes())) return deallocate(fresh);  // later
  index_stamp_ = stamp;
  say("DYNAMICCL: %d ranks on %d nodes: a new artifact (%.12s) is put to the ranks",
      place_.num_ranks, place_.num_nodes, fresh->hash());
  deallocate(artifact_);
  artifact_ = fresh;
}

}  // namespace dynamiccl
