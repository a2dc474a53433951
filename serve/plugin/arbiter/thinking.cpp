// Implementation of thinking.h.
#include "arbiter/thinking.h"

#include <cstdlib>
#include <thread>
#include <utility>

#include "vocabulary.h"

namespace dynamiccl {

bool Thinking::ask(Question question) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!open_.insert(question.comm_id).second) return false;
  if (!is_running_) std::thread(&Thinking::run, this).detach();  // as long as the worker
  is_running_ = true;
  questions_.push_back(std::move(question));
  has_question_.notify_one();
  return true;
}

std::unique_ptr<Thinking::Answer> Thinking::take(std::uint64_t comm_id) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = answers_.find(comm_id);
  if (found == answers_.end()) return nullptr;
  auto answer = std::make_unique<Answer>(std::move(found->second));
  answers_.erase(found);
  open_.erase(comm_id);
  return answer;
}

void Thinking::forget(std::uint64_t comm_id) {
  const std::lock_guard<std::mutex> lock(mutex_);
  answers_.erase(comm_id);
  forgotten_.push_back(comm_id);
}

void Thinking::run() {
  for (;;) {
    Question question;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      has_question_.wait(lock, [this] { return !questions_.empty(); });
      for (const std::uint64_t comm_id : forgotten_) {
        brains_.erase(comm_id);
        open_.erase(comm_id);
      }
      forgotten_.clear();
      question = std::move(questions_.front());
      questions_.pop_front();
    }
    Answer answer = think(question);
    answer.edition = question.edition;
    const std::lock_guard<std::mutex> lock(mutex_);
    answers_[question.comm_id] = std::move(answer);
  }
}

Thinking::Answer Thinking::think(const Question& question) {
  Brain& kept = brains_[question.comm_id];
  BrainHandle* brain = &kept.handle;
  if (kept.edition != question.edition) brain->close();
  kept.edition = question.edition;
  char reason[DYNAMICCL_REASON_BYTES] = "";
  const char* artifact = std::getenv("DYNAMICCL_ARTIFACT");
  dynamiccl_brain_config config = {};
  config.artifact = artifact != nullptr ? artifact : "";
  config.system = question.system.c_str();
  config.socket = std::getenv("DYNAMICCL_BRAIN_SOCKET");
  if (config.socket != nullptr && *config.socket == '\0') config.socket = nullptr;
  config.num_nodes = static_cast<std::int32_t>(question.num_nodes);
  config.num_ranks = static_cast<std::int32_t>(question.num_ranks);
  if (!brain->is_open() && !brain->open(config, reason, sizeof reason)) return {reason, {}, 0};
  dynamiccl_history history = {};
  history.tasks = question.tasks.data();
  history.num_tasks = static_cast<std::int32_t>(question.tasks.size());
  history.table = question.table.empty() ? nullptr : question.table.data();
  history.table_bytes = question.table.size();
  std::vector<std::uint8_t> table(kMaxFileBytes);
  std::size_t size = 0;
  if (!brain->decide(history, table.data(), table.size(), &size, reason, sizeof reason)) {
    return {reason, {}, 0};
  }
  table.resize(size);
  return {"", table, 0};
}

}  // namespace dynamiccl
