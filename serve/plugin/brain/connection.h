// A leader's connection to the brain of one communicator.
//
// The process at the other end must belong to this user. Every wait is bounded: a slow, dead or
// faulty brain costs the thread that asks some seconds, the connection is closed, and the next
// question makes another.
#pragma once

#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>

#include <cstdint>
#include <string>
#include <vector>

#include "brain/message.h"
#include "file.h"

namespace dynamiccl {

struct BrainAnswer {
  std::string problem;              // why there is no decision
  std::vector<std::uint8_t> table;  // none: keep the one in force
};

class BrainConnection {
 public:
  /// `path`: of a socket in the file system; else `address` is used. `limit`: how long connecting,
  /// a question and its answer may take each; the first may have to wait for torch to be loaded.
  explicit BrainConnection(const std::string& path, timeval limit = {30, 0});
  BrainConnection(const sockaddr_un& address, socklen_t size) : address_(address), size_(size) {}

  /// Connects with the first question, so a brain may start after the job.
  BrainAnswer ask(const BrainAsk& ask);

 private:
  const char* connect_now();
  const char* exchange(const BrainAsk& ask, BrainAnswer* answer);

  const std::string path_;  // empty: none
  const timeval limit_ = {30, 0};
  sockaddr_un address_ = {};
  socklen_t size_ = sizeof address_;
  File socket_;
  std::uint64_t number_ = 0;
};

}  // namespace dynamiccl
