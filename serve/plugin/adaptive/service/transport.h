// How the ranks of a communicator reach each other: over local sockets, whose paths follow from
// job, communicator and rank; or over TCP, through the directory of world rank 0.
#pragma once

#include <cstdint>

#include "adaptive/agreement/agreement.h"
#include "adaptive/service/directory.h"
#include "adaptive/service/network.h"
#include "file.h"
#include "identity/job.h"

namespace dynamiccl {

class Transport {
 public:
  /// Null on success, else why no agreement is possible.
  const char* start(const Settings& settings, const Job& job, Network* network) noexcept;
  bool runs_directory() const noexcept { return runs_directory_; }

  /// Listen for the ranks of an agreement. Null, or why not.
  const char* open(Agreement* agreement) noexcept;
  void close(Agreement* agreement) noexcept;

  /// Connect, register and look up what is due; returns when it is due again.
  std::uint64_t tick(Agreement* agreements, std::uint64_t now_ns) noexcept;

  /// A connection to `rank`, maybe still connecting; null when its address is not known (yet).
  Connection* connect(Agreement* agreement, std::int32_t rank, std::uint64_t now_ns) noexcept;

  /// The first message of a client, which identifies its connection.
  void introduce(Connection* connection) noexcept;

  /// Leader only, once all ranks have joined.
  void tell_peers(const Agreement& agreement, const Outlet& outlet) const noexcept;

  void directory_message(Connection* connection, const Message& message,
                         Agreement* agreements) noexcept;
  void directory_closed(Connection* connection) noexcept;

 private:
  const char* start_local(const Settings& settings, const Job& job) noexcept;
  const char* start_tcp(const Settings& settings, const Job& job) noexcept;
  bool listen_for_ranks(const Job& job) noexcept;
  bool path_of(const Agreement& agreement, std::int32_t rank, Address* address) const noexcept;

  Network* network_ = nullptr;
  bool has_coordinator_ = false;
  bool runs_directory_ = false;
  char run_dir_[4096] = "";
  File run_directory_;  // the same, open
  Address coordinator_ = {};
  Address own_ = {};
  char own_text_[kAddressTextBytes] = "";
  Connection* to_directory_ = nullptr;
  std::uint64_t directory_at_ns_ = 0;
  std::uint64_t ask_at_ns_ = 0;
  Directory directory_;
};

/// The secret of the job's messages. Null on success, else why there is none.
const char* find_secret(const Settings& settings, const Job& job, Secret* secret) noexcept;

}  // namespace dynamiccl
