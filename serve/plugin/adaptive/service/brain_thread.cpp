// Answers one question at a time, of any leader that is due. A slow brain delays only other brains,
// and a failing one leaves the table in force.
#include "adaptive/service/brain_thread.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "adaptive/agreement/guard.h"
#include "adaptive/brain/brain.h"
#include "adaptive/service/service.h"
#include "platform/allocate.h"
#include "platform/exit_gate.h"
#include "platform/threads.h"
#include "table.h"

namespace dynamiccl {
namespace {

/// A question and its answer; held by one thread at a time.
struct Question {
  Agreement* agreement;
  char system[128];  // the artifact may be another one by the time that it is thought about
  dynamiccl_task* tasks;
  int num_tasks;
  std::uint8_t table[kMaxFileBytes];
  std::size_t table_bytes;
  bool failed;
  char reason[DYNAMICCL_REASON_BYTES];
};

/// The brain of one leader, opened with its first question and kept as long as the communicator.
struct Kept {
  Kept* next = nullptr;
  Agreement* agreement = nullptr;  // held
  BrainHandle brain;
};

Mutex g_mutex;
bool g_running = false;
Question* g_asked = nullptr;     // for the thread
Question* g_answered = nullptr;  // for the service
bool g_is_thinking = false;
Kept* g_kept = nullptr;  // the thread's

void discard(Question* question) noexcept {
  question->agreement->let_go();
  std::free(question->tasks);
  std::free(question);
}

BrainHandle* brain_of(Agreement* agreement) noexcept {
  for (Kept* each = g_kept; each != nullptr; each = each->next) {
    if (each->agreement == agreement) return &each->brain;
  }
  Kept* kept = allocate<Kept>();
  if (kept == nullptr) return nullptr;
  kept->next = g_kept;
  kept->agreement = agreement->hold();
  g_kept = kept;
  return &kept->brain;
}

bool is_gone(const Agreement& agreement) noexcept {
  return agreement.closing.load(std::memory_order_acquire);
}

bool any_is_gone() noexcept {
  const Kept* each = g_kept;
  while (each != nullptr && !is_gone(*each->agreement)) each = each->next;
  return each != nullptr;
}

/// Brains of communicators that no longer exist.
void close_brains() noexcept {
  for (Kept** place = &g_kept; *place != nullptr;) {
    Kept* kept = *place;
    if (!is_gone(*kept->agreement)) {
      place = &kept->next;
      continue;
    }
    *place = kept->next;
    kept->agreement->let_go();
    deallocate(kept);
  }
}

void think(Question* question) noexcept {
  Agreement& agreement = *question->agreement;
  question->failed = true;
  if (is_gone(agreement)) return;
  BrainHandle* brain = brain_of(&agreement);
  if (brain == nullptr) return;
  const dynamiccl_brain_config config = {agreement.settings().artifact, question->system,
                                         agreement.settings().brain_socket,
                                         agreement.place().num_nodes, agreement.place().num_ranks};
  if (!brain->is_open() && !brain->open(config, question->reason, sizeof question->reason)) return;
  const dynamiccl_history history = {question->tasks, question->num_tasks,
                                     question->table_bytes > 0 ? question->table : nullptr,
                                     question->table_bytes};
  std::uint8_t next[kMaxFileBytes];
  std::size_t bytes = 0;
  if (!brain->decide(history, next, sizeof next, &bytes, question->reason,
                     sizeof question->reason)) {
    return;
  }
  question->failed = false;
  const bool is_same =
      bytes == question->table_bytes && std::memcmp(next, question->table, bytes) == 0;
  question->table_bytes = is_same ? 0 : bytes;
  std::memcpy(question->table, next, bytes);
}

/// False when the process ends.
bool answer(Question* question) noexcept {
  if (question == nullptr && !any_is_gone()) return true;
  const BeforeExit work;
  if (!work.may_begin()) return false;
  close_brains();
  if (question != nullptr) think(question);
  return true;
}

void* run(void*) {
  for (;;) {
    Question* question = nullptr;
    {
      const Lock lock(&g_mutex);
      question = g_asked;
      g_asked = nullptr;
    }
    if (!answer(question)) return nullptr;
    if (question == nullptr) {
      sleep_ns(20'000'000);
      continue;
    }
    {
      const Lock lock(&g_mutex);
      g_answered = question;
    }
    wake_service();
  }
}

}  // namespace

void ask_brain(Agreement* agreement, std::uint64_t now_ns) noexcept {
  if (!agreement->brain_is_due(now_ns)) return;
  const Lock lock(&g_mutex);
  if (g_is_thinking) return;
  auto* question = static_cast<Question*>(std::calloc(1, sizeof(Question)));
  if (question == nullptr) return;
  question->tasks = static_cast<dynamiccl_task*>(
      std::malloc(sizeof(dynamiccl_task) * static_cast<std::size_t>(Guard::kTasks)));
  question->agreement = agreement->hold();
  if (question->tasks == nullptr) return discard(question);
  question->num_tasks = agreement->guard()->copy_tasks(question->tasks, Guard::kTasks);
  question->table_bytes = agreement->copy_current(question->table);
  std::snprintf(question->system, sizeof question->system, "%s", agreement->artifact()->system());
  if (!g_running) {
    if (!start_thread(run, nullptr, "dynamiccl-brain")) return discard(question);
    g_running = true;
  }
  g_asked = question;
  g_is_thinking = true;
}

void take_proposals(std::uint64_t) noexcept {
  Question* question = nullptr;
  {
    const Lock lock(&g_mutex);
    question = g_answered;
    g_answered = nullptr;
    if (question != nullptr) g_is_thinking = false;
  }
  if (question == nullptr) return;
  question->agreement->brain_answered(question->failed ? question->reason : nullptr,
                                      question->table, question->table_bytes);
  discard(question);
}

}  // namespace dynamiccl
