// The brains of a job's communicators: dynamiccl-brain, which is started when it is first needed,
// or a process that listens at a socket (brain/connection.h). One thread asks them, one question
// after the other: ranks never wait for a brain.
//
//   DYNAMICCL_BRAIN_SOCKET  the brain is the process that listens there. Default: dynamiccl-brain,
//                           which lies beside this program where it was built with torch.
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "brain/connection.h"

namespace dynamiccl {

class BrainThread {
 public:
  /// False while an earlier question of this communicator is open.
  bool ask(std::uint64_t comm_id, BrainAsk question);
  /// The answer to it, once.
  std::unique_ptr<BrainAnswer> take(std::uint64_t comm_id);
  /// The communicator is no more, or its next question is about another artifact.
  void forget(std::uint64_t comm_id);

 private:
  [[noreturn]] void run();
  BrainAnswer think(std::uint64_t comm_id, const BrainAsk& question);
  const char* start_brain();

  std::mutex mutex_;  // of these
  std::condition_variable has_question_;
  bool is_running_ = false;
  struct Question {
    std::uint64_t comm_id, number;
    BrainAsk ask;
  };
  std::deque<Question> questions_;
  std::vector<std::uint64_t> forgotten_;
  std::map<std::uint64_t, std::uint64_t> open_;  // the number of a communicator's question
  std::uint64_t last_number_ = 0;
  std::map<std::uint64_t, BrainAnswer> answers_;

  // The thread's.
  std::map<std::uint64_t, std::unique_ptr<BrainConnection>> brains_;
  pid_t brain_ = 0;  // of dynamiccl-brain
  sockaddr_un address_ = {};
  socklen_t size_ = 0;
};

}  // namespace dynamiccl
