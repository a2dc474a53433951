// The directory of a job: the address of each communicator's leader. World rank 0 runs it.
#pragma once

#include <cstdint>

#include "adaptive/service/address.h"
#include "adaptive/wire/message.h"

namespace dynamiccl {

class Directory {
 public:
  static constexpr int kMostEntries = 65536;

  Directory() = default;
  ~Directory();
  Directory(const Directory&) = delete;
  Directory& operator=(const Directory&) = delete;

  /// Handle a message to the directory. True: send `answer`, whose body is valid until the next
  /// call.
  bool receive(const Message& message, Message* answer) noexcept;

  int size() const noexcept { return size_; }

 private:
  struct Entry {
    std::uint64_t comm_id;
    char address[kAddressTextBytes];
  };
  Entry* find(std::uint64_t comm_id) noexcept;

  Entry* entries_ = nullptr;
  int size_ = 0;
  int capacity_ = 0;
};

}  // namespace dynamiccl
