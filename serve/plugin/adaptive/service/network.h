// Connections of this process: sockets, their sessions, and one poll loop for all.
#pragma once

#include <poll.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "adaptive/service/address.h"
#include "adaptive/wire/session.h"

namespace dynamiccl {

class Agreement;

/// One connection; owned by Network.
struct Connection {
  int descriptor = -1;
  bool is_client = false;
  bool is_connecting = false;
  bool is_local = false;
  bool was_established = false;
  std::uint64_t since_ns = 0;
  Session session;
  Agreement* owner = nullptr;   // null: not said yet, or the directory's
  std::int32_t peer_rank = -1;  // in the owner's communicator
  bool is_directory = false;    // to or from the directory
};

/// A listening socket.
struct Listener {
  int descriptor = -1;
  bool is_directory = false;
};

inline constexpr int kMostListeners = 1024;

class Network {
 public:
  /// Callbacks of the network. They must not call run(); they may send, open and close.
  struct Events {
    void (*established)(void* user, Connection* connection);
    void (*message)(void* user, Connection* connection, const Message& message);
    void (*closed)(void* user, Connection* connection);
    void* user;
  };

  bool start(const Events& events, const Secret& secret) noexcept;
  void stop() noexcept;
  Network() = default;
  ~Network() { stop(); }
  Network(const Network&) = delete;
  Network& operator=(const Network&) = delete;

  /// Null on success, else why not. Port 0 is replaced by the assigned port.
  const char* listen(Address* address, bool is_directory, int* descriptor) noexcept;
  void stop_listening(int descriptor) noexcept;

  /// Start to connect; null when that fails at once.
  Connection* connect(const Address& address, std::uint64_t comm_id, std::uint64_t now_ns) noexcept;
  /// Close the connection after the current event, without the `closed` callback.
  void close(Connection* connection) noexcept;
  /// Close all connections of an agreement that is about to be freed.
  void disown(const Agreement* agreement) noexcept;
  /// Seal and send as much as possible now. False: not established, or too much is waiting.
  bool send(Connection* connection, const Message& message) noexcept;

  /// Wait for at most `timeout_ns`, or until wake(), and call the callbacks.
  void run(std::uint64_t timeout_ns) noexcept;
  /// Callable from any thread.
  void wake() noexcept;

  const Secret& secret() const noexcept { return secret_; }
  /// Half of the descriptor limit: the job needs the others.
  int most_connections() const noexcept { return most_connections_; }

 private:
  static constexpr int kMostConnections = 16384;
  static constexpr int kMostStrangers = 256;  // accepted, and not established
  static constexpr std::uint64_t kStrangerNs = 5'000'000'000;

  bool grow() noexcept;
  Connection* add(int descriptor, Session::Role role, std::uint64_t comm_id,
                  std::uint64_t now_ns) noexcept;
  void accept_from(const Listener& listener, std::uint64_t now_ns) noexcept;
  void drop(Connection* connection) noexcept;
  void read_from(Connection* connection) noexcept;
  bool flush(Connection* connection) noexcept;
  void sweep(std::uint64_t now_ns) noexcept;

  Events events_ = {};
  Secret secret_ = {};
  std::atomic<int> wake_{-1};
  int most_connections_ = 0;
  std::uint64_t accept_at_ns_ = 0;  // no descriptor could be had
  std::uint8_t* received_ = nullptr;
  Listener* listeners_ = nullptr;
  int num_listeners_ = 0;
  int listeners_capacity_ = 0;
  Connection** connections_ = nullptr;
  pollfd* polled_ = nullptr;
  int num_connections_ = 0;
  int capacity_ = 0;
};

}  // namespace dynamiccl
