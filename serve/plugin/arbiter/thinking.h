// The brains of a job's communicators: TorchScript in this process, or another process
// (adaptive/brain/brain.h). One thread asks them, one question after the other: ranks never wait
// for a brain.
//
//   DYNAMICCL_BRAIN_SOCKET  the brain is the process that listens there. Default: TorchScript.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "adaptive/brain/brain.h"

namespace dynamiccl {

class Thinking {
 public:
  struct Question {
    std::uint64_t comm_id;
    std::uint64_t edition;  // of the artifact: a brain knows one
    std::string system;
    std::uint32_t num_nodes, num_ranks;
    std::vector<dynamiccl_task> tasks;
    std::vector<std::uint8_t> table;  // in force; none: NCCL's own choice
  };
  struct Answer {
    std::string problem;              // why there is no decision
    std::vector<std::uint8_t> table;  // none: keep the one in force
    std::uint64_t edition = 0;        // of the question
  };

  /// False while an earlier question of this communicator is open.
  bool ask(Question question);
  /// The answer to it, once.
  std::unique_ptr<Answer> take(std::uint64_t comm_id);
  /// The communicator is no more.
  void forget(std::uint64_t comm_id);

 private:
  [[noreturn]] void run();
  Answer think(const Question& question);

  std::mutex mutex_;  // of these
  std::condition_variable has_question_;
  bool is_running_ = false;
  std::deque<Question> questions_;
  std::vector<std::uint64_t> forgotten_;
  std::set<std::uint64_t> open_;
  std::map<std::uint64_t, Answer> answers_;

  struct Brain {
    BrainHandle handle;
    std::uint64_t edition = 0;
  };
  std::map<std::uint64_t, Brain> brains_;  // the thread's
};

}  // namespace dynamiccl
