// A brain in another process on this machine, reached over a Unix socket.
//
// The socket must belong to root or this user, nobody else may be able to connect to it or replace
// it, and the peer process must belong to this user. Every wait is bounded: a slow, dead or faulty
// brain costs its caller a few seconds, the connection is closed, and the next question reconnects.
// The messages are described in brain/message.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "brain/brain_abi.h"
#include "brain/message.h"

namespace dynamiccl {

/// Time limits of each step.
struct SocketLimits {
  std::uint64_t connect_ns = 1'000'000'000;
  std::uint64_t answer_ns = 5'000'000'000;  // to take the question and to answer it
};

/// The client of one communicator. Not thread-safe.
class SocketBrain {
 public:
  explicit SocketBrain(const SocketLimits& limits) noexcept : limits_(limits) {}
  ~SocketBrain();
  SocketBrain(const SocketBrain&) = delete;
  SocketBrain& operator=(const SocketBrain&) = delete;

  /// Keeps `config`; connects with the first question, so a brain may start after the job.
  bool open(const dynamiccl_brain_config& config, char* reason, std::size_t reason_bytes) noexcept;

  /// As `decide` in brain_abi.h.
  bool decide(const dynamiccl_history& history, std::uint8_t* table, std::size_t capacity,
              std::size_t* table_bytes, char* reason, std::size_t reason_bytes) noexcept;

 private:
  const char* connect_now() noexcept;
  const char* wait_for_connection(int descriptor, const void* address) const noexcept;
  const char* exchange(std::size_t ask_bytes, BrainAnswer* answer) noexcept;
  void disconnect() noexcept;

  SocketLimits limits_;
  int descriptor_ = -1;
  std::uint64_t number_ = 0;
  dynamiccl_brain_config config_ = {};
  std::uint8_t* ask_ = nullptr;  // kMaxAskBytes, and behind it the three strings of config_
  std::uint8_t answer_[kMaxAnswerBytes];
};

/// The same as an implementation of Brain, with the limits above.
const dynamiccl_brain* socket_brain() noexcept;

}  // namespace dynamiccl
