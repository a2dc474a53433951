// An authenticated connection between two ranks.
//
// All ranks of a job share a key. Both ends prove that they have it, over fresh nonces, and each
// message carries a MAC under a key of this one connection and direction, with a counter.
//
// This protects a job from: strangers on the port; another job and another restart of this one;
// a recorded connection or message played again; messages altered, dropped, reordered, sent back to
// their sender or moved to another connection. Whatever of this happens, the connection ends, and
// what was delivered until then is what the other end sent, in its order, from the first on.
//
// It does not protect from: somebody who has the key, which makes him any rank; somebody who reads
// along, as nothing is secret; somebody who cuts the connection or delays it. A server accepts any
// communicator that its client names, so it has to look at comm_id().
#pragma once

#include <cstddef>
#include <cstdint>

#include "adaptive/wire/buffer.h"
#include "adaptive/wire/message.h"
#include "crypto/sha256.h"

namespace dynamiccl {

/// What the ranks of a job share, and strangers, other jobs and other restarts do not.
struct Secret {
  std::uint8_t key[kDigestBytes];
  std::uint64_t job;  // hash of the job's name
  std::uint32_t restart;
};

inline constexpr std::size_t kNonceBytes = 16;
inline constexpr std::size_t kFrameHeaderBytes = 12;  // u32 size of the message, u64 counter
inline constexpr std::size_t kFrameMacBytes = 16;     // the first bytes of the HMAC
inline constexpr std::size_t kMaxFrameBytes = kFrameHeaderBytes + kMaxMessageBytes + kFrameMacBytes;
inline constexpr std::size_t kMaxOutgoingBytes = 1024 * 1024;

// The handshake, all little-endian:
//   client  {magic, u32 version, u32 restart, u64 job, u64 comm_id, nonce[16], MAC[32]}
//   server  {nonce[16], MAC[32] over both nonces and all of the above}
//   client  a frame without a message and with counter 0, under the session's keys: whoever only
//           plays back what he heard cannot make it, and the server counts him as nobody.
// From then on both send frames {u32 size, u64 counter from 1, message, MAC[16]}.
inline constexpr std::uint8_t kSessionMagic[8] = {'D', 'C', 'W', 'I', 'R', 'E', '\r', '\n'};
inline constexpr std::uint32_t kSessionVersion = 1;
inline constexpr std::size_t kClientProofBytes = 48;  // without its MAC
inline constexpr std::size_t kClientHelloBytes = kClientProofBytes + kDigestBytes;
inline constexpr std::size_t kServerHelloBytes = kNonceBytes + kDigestBytes;

/// One end of a connection; handles bytes only. For one thread at a time.
class Session {
 public:
  enum class Role : std::uint8_t { kClient, kServer };
  using OnMessage = void (*)(void* user, const Message& message);

  Session() = default;
  ~Session() { reset(); }
  Session(Session&& other) noexcept;
  Session& operator=(Session&& other) noexcept;

  /// Starts anew. `nonce` must never have been used before. A client names its communicator (0: it
  /// asks the directory) and has bytes to send at once; a server sends nothing before it has seen a
  /// client's proof. False: memory is short.
  bool begin(Role role, const Secret& secret, std::uint64_t comm_id,
             const std::uint8_t nonce[kNonceBytes]) noexcept;

  /// Takes received bytes, however they were cut. False: the connection must be closed; problem()
  /// then says why. The callback may seal and reset, but not receive, move or destroy the session.
  bool receive(const std::uint8_t* bytes, std::size_t size, OnMessage on_message,
               void* user) noexcept;

  /// Adds a message to the outgoing bytes. False: not established, no sound message, or more than
  /// kMaxOutgoingBytes would wait; the session stays as it was.
  bool seal(const Message& message) noexcept;

  const std::uint8_t* pending(std::size_t* size) const noexcept;
  void sent(std::size_t bytes) noexcept { outgoing_.take(bytes); }

  /// Both ends have proved themselves.
  bool established() const noexcept { return state_ == State::kEstablished; }
  /// The communicator that the client named; a server may rely on it once established.
  std::uint64_t comm_id() const noexcept { return comm_id_; }
  /// Why receive() returned false, as a clause, or null.
  const char* problem() const noexcept { return problem_; }

  /// Frees all memory and erases the keys.
  void reset() noexcept;

 private:
  enum class State : std::uint8_t {
    kClosed,
    kAwaitingClient,  // server: nothing sent yet
    kAwaitingServer,  // client: has sent its proof
    kAwaitingProof,   // server: has answered
    kEstablished,
  };

  std::size_t next_size(const std::uint8_t* bytes, std::size_t size) noexcept;
  bool take(const std::uint8_t* bytes, std::size_t size, OnMessage on_message, void* user) noexcept;
  bool take_client_hello(const std::uint8_t* hello) noexcept;
  bool take_server_hello(const std::uint8_t* hello) noexcept;
  bool take_frame(const std::uint8_t* frame, std::size_t size, OnMessage on_message,
                  void* user) noexcept;
  bool seal_frame(const Message* message) noexcept;
  void mac_of_server(std::uint8_t* mac) const noexcept;
  void derive_keys() noexcept;
  bool fail(const char* problem) noexcept;

  Buffer incoming_;  // of one hello or frame that is not complete yet
  Buffer outgoing_;
  std::uint64_t comm_id_ = 0;
  std::uint64_t next_sent_ = 0;  // counters
  std::uint64_t next_received_ = 0;
  const char* problem_ = nullptr;
  Secret secret_ = {};                          // until the keys below are made
  std::uint8_t proof_[kClientProofBytes] = {};  // what the client's hello says
  std::uint8_t nonce_[kNonceBytes] = {};        // the server's
  std::uint8_t keys_[2][kDigestBytes] = {};     // [direction: Role of the sender]
  Role role_ = Role::kClient;
  State state_ = State::kClosed;
};

}  // namespace dynamiccl
