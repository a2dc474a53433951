// A leader's connection to the brain of one communicator.
//
// The process at the other end must belong to this user. Every wait is bounded: a slow, dead or
// faulty brain costs the thread that asks some seconds, the connection is closed, and the next
// question makes another.
#pragma once

#include <sys/socket.h>
#include <sys/un.h>

#include <cstdint>
#include <string>

#include "brain/message.h"

namespace dynamiccl {

/// Time limits of each step. The first question may have to wait for torch to be loaded.
struct BrainLimits {
  std::uint64_t connect_ms = 1'000;
  std::uint64_t answer_ms = 30'000;  // to take the question and to answer it
};

class BrainConnection {
 public:
  /// `path`: of a socket in the file system; else `address` is used.
  explicit BrainConnection(const std::string& path, const BrainLimits& limits = {});
  BrainConnection(const sockaddr_un& address, socklen_t size, const BrainLimits& limits = {});
  ~BrainConnection() { disconnect(); }
  BrainConnection(const BrainConnection&) = delete;
  BrainConnection& operator=(const BrainConnection&) = delete;

  /// Connects with the first question, so a brain may start after the job.
  BrainAnswer ask(const BrainAsk& ask);

 private:
  const char* connect_now();
  const char* exchange(const BrainAsk& ask, BrainAnswer* answer);
  const char* move_all(char* bytes, std::size_t size, short events, std::uint64_t until_ms);
  void disconnect();

  const std::string path_;  // empty: none
  const BrainLimits limits_;
  sockaddr_un address_ = {};
  socklen_t size_ = 0;
  int descriptor_ = -1;
  std::uint64_t number_ = 0;
};

}  // namespace dynamiccl
