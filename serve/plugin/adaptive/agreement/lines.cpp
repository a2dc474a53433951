// Messages about an agreement for NCCL's log, one line each.
#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "adaptive/agreement/agreement.h"

namespace dynamiccl {

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

/// The first rank that has not joined, for the message if it never does.
void Agreement::note_missing() noexcept {
  if (leader_->state() != Leader::State::kGathering) return;
  note("DYNAMICCL: %d ranks on %d nodes: NCCL's own choice stood: rank %d did not take part",
       place_.num_ranks, place_.num_nodes, leader_->first_missing());
}

/// Logs the first decision; later ones only when they differ from it.
void Agreement::note_decision() noexcept {
  const std::uint32_t decided = member_->decided();
  if (decided == told_of_) return;
  const bool is_first = told_of_ == 0;
  if (clock_.table_number() == 0) return;
  told_of_ = decided;
  if (!is_first) return;
  say("DYNAMICCL: %d ranks on %d nodes: decisions of %s (artifact %.12s, system %s; %d of %d bins "
      "decided) since call %llu; results are not bitwise the same from run to run, as tables "
      "change "
      "with the network",
      place_.num_ranks, place_.num_nodes, settings_->artifact, artifact_->hash(),
      artifact_->system(), artifact_->num_decided(), artifact_->num_entries(),
      static_cast<unsigned long long>(member_->decided_at()));
}

}  // namespace dynamiccl
