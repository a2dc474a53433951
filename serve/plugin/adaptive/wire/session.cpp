// No received byte is interpreted before its MAC is checked, except a hello's magic and a frame's
// size.
#include "adaptive/wire/session.h"

#include <string.h>  // explicit_bzero

#include <algorithm>

#include "platform/bytes.h"

namespace dynamiccl {
namespace {

// Domain separators of hashed texts; none is a prefix of another.
constexpr char kClientLabel[] = "dynamiccl-client";
constexpr char kServerLabel[] = "dynamiccl-server";
constexpr char kSessionLabel[] = "dynamiccl-session";

constexpr std::size_t kVersionOffset = sizeof kSessionMagic;
constexpr std::size_t kRestartOffset = kVersionOffset + 4;
constexpr std::size_t kJobOffset = kRestartOffset + 4;
constexpr std::size_t kCommOffset = kJobOffset + 8;
constexpr std::size_t kNonceOffset = kCommOffset + 8;
static_assert(kNonceOffset + kNonceBytes == kClientProofBytes);
static_assert(kClientHelloBytes + kFrameHeaderBytes + kFrameMacBytes < 256,
              "all that a stranger can make a server hold");

template <std::size_t Size>
Piece piece_of(const char (&label)[Size]) noexcept {
  return {label, Size - 1};
}

void mac_of_frame(const std::uint8_t (&key)[kDigestBytes], const std::uint8_t* frame,
                  std::size_t size, std::uint8_t (&mac)[kDigestBytes]) noexcept {
  const Piece piece = {frame, size};
  hmac_sha256(key, &piece, 1, mac);
}

}  // namespace

Session::Session(Session&& other) noexcept { *this = static_cast<Session&&>(other); }

Session& Session::operator=(Session&& other) noexcept {
  if (this == &other) return *this;
  reset();
  incoming_ = static_cast<Buffer&&>(other.incoming_);
  outgoing_ = static_cast<Buffer&&>(other.outgoing_);
  comm_id_ = other.comm_id_;
  next_sent_ = other.next_sent_;
  next_received_ = other.next_received_;
  problem_ = other.problem_;
  secret_ = other.secret_;
  std::copy(other.proof_, other.proof_ + sizeof proof_, proof_);
  std::copy(other.nonce_, other.nonce_ + sizeof nonce_, nonce_);
  std::copy(&other.keys_[0][0], &other.keys_[0][0] + sizeof keys_, &keys_[0][0]);
  role_ = other.role_;
  state_ = other.state_;
  other.reset();
  return *this;
}

bool Session::begin(Role role, const Secret& secret, std::uint64_t comm_id,
                    const std::uint8_t nonce[kNonceBytes]) noexcept {
  reset();
  role_ = role;
  secret_ = secret;
  if (role == Role::kServer) {
    std::copy(nonce, nonce + kNonceBytes, nonce_);
    state_ = State::kAwaitingClient;
    return true;
  }
  comm_id_ = comm_id;
  std::copy(kSessionMagic, kSessionMagic + sizeof kSessionMagic, proof_);
  write_unsigned(kSessionVersion, 4, proof_ + kVersionOffset);
  write_unsigned(secret.restart, 4, proof_ + kRestartOffset);
  write_unsigned(secret.job, 8, proof_ + kJobOffset);
  write_unsigned(comm_id, 8, proof_ + kCommOffset);
  std::copy(nonce, nonce + kNonceBytes, proof_ + kNonceOffset);
  std::uint8_t* hello = outgoing_.room(kClientHelloBytes, kMaxOutgoingBytes);
  if (hello == nullptr) return fail("memory is short");
  std::copy(proof_, proof_ + sizeof proof_, hello);
  const Piece pieces[] = {piece_of(kClientLabel), {proof_, sizeof proof_}};
  hmac_sha256(secret_.key, pieces, 2, hello + kClientProofBytes);
  outgoing_.add(kClientHelloBytes);
  state_ = State::kAwaitingServer;
  return true;
}

bool Session::receive(const std::uint8_t* bytes, std::size_t size, OnMessage on_message,
                      void* user) noexcept {
  if (state_ == State::kClosed) return false;
  while (size != 0) {
    const bool in_place = incoming_.size() == 0;
    std::size_t needed =
        in_place ? next_size(bytes, size) : next_size(incoming_.bytes(), incoming_.size());
    if (needed == 0) return false;
    if (in_place && needed <= size) {
      if (!take(bytes, needed, on_message, user)) return false;
      bytes += needed;
      size -= needed;
      continue;
    }
    const std::size_t more = std::min(size, needed - incoming_.size());
    std::uint8_t* room = incoming_.room(more, needed);
    if (room == nullptr) return fail("memory is short");
    std::copy(bytes, bytes + more, room);
    incoming_.add(more);
    bytes += more;
    size -= more;
    needed = next_size(incoming_.bytes(), incoming_.size());
    if (needed == 0) return false;
    if (needed > incoming_.size()) continue;
    if (!take(incoming_.bytes(), needed, on_message, user)) return false;
    incoming_.take(needed);
  }
  return true;
}

/// Size of the hello or frame that begins here, or the bytes needed to tell; 0 after a failure.
std::size_t Session::next_size(const std::uint8_t* bytes, std::size_t size) noexcept {
  if (state_ == State::kAwaitingServer) return kServerHelloBytes;
  if (state_ == State::kAwaitingClient) {
    const std::size_t seen = std::min(size, sizeof kSessionMagic);
    if (std::equal(bytes, bytes + seen, kSessionMagic)) return kClientHelloBytes;
    fail("it does not speak our protocol");
    return 0;
  }
  if (size < kFrameHeaderBytes) return kFrameHeaderBytes;
  const std::uint64_t message_bytes = read_unsigned(bytes, 4);
  const bool sound = established()
                         ? message_bytes >= kMessageHeaderBytes && message_bytes <= kMaxMessageBytes
                         : message_bytes == 0;
  if (sound) return kFrameHeaderBytes + message_bytes + kFrameMacBytes;
  fail("a frame has an impossible size");
  return 0;
}

bool Session::take(const std::uint8_t* bytes, std::size_t size, OnMessage on_message,
                   void* user) noexcept {
  if (state_ == State::kAwaitingClient) return take_client_hello(bytes);
  if (state_ == State::kAwaitingServer) return take_server_hello(bytes);
  return take_frame(bytes, size, on_message, user);
}

bool Session::take_client_hello(const std::uint8_t* hello) noexcept {
  if (read_unsigned(hello + kVersionOffset, 4) != kSessionVersion) {
    return fail("its protocol has another version");
  }
  std::uint8_t mac[kDigestBytes];
  const Piece pieces[] = {piece_of(kClientLabel), {hello, kClientProofBytes}};
  hmac_sha256(secret_.key, pieces, 2, mac);
  if (!equal_in_constant_time(mac, hello + kClientProofBytes, sizeof mac)) {
    return fail("it has another key");
  }
  if (read_unsigned(hello + kJobOffset, 8) != secret_.job) return fail("it is of another job");
  if (read_unsigned(hello + kRestartOffset, 4) != secret_.restart) {
    return fail("it is of another restart of this job");
  }
  comm_id_ = read_unsigned(hello + kCommOffset, 8);
  std::copy(hello, hello + kClientProofBytes, proof_);
  std::uint8_t* answer = outgoing_.room(kServerHelloBytes, kMaxOutgoingBytes);
  if (answer == nullptr) return fail("memory is short");
  std::copy(nonce_, nonce_ + kNonceBytes, answer);
  mac_of_server(answer + kNonceBytes);
  outgoing_.add(kServerHelloBytes);
  derive_keys();
  state_ = State::kAwaitingProof;
  next_sent_ = 1;
  next_received_ = 0;
  return true;
}

bool Session::take_server_hello(const std::uint8_t* hello) noexcept {
  std::copy(hello, hello + kNonceBytes, nonce_);
  std::uint8_t mac[kDigestBytes];
  mac_of_server(mac);
  if (!equal_in_constant_time(mac, hello + kNonceBytes, sizeof mac)) {
    return fail("its answer does not fit: it has another key, or is of another job");
  }
  derive_keys();
  state_ = State::kEstablished;
  next_sent_ = 0;
  next_received_ = 1;
  return seal_frame(nullptr) || fail("memory is short");
}

bool Session::take_frame(const std::uint8_t* frame, std::size_t size, OnMessage on_message,
                         void* user) noexcept {
  const Role sender = role_ == Role::kClient ? Role::kServer : Role::kClient;
  const std::size_t sealed_bytes = size - kFrameMacBytes;
  std::uint8_t mac[kDigestBytes];
  mac_of_frame(keys_[static_cast<int>(sender)], frame, sealed_bytes, mac);
  if (!equal_in_constant_time(mac, frame + sealed_bytes, kFrameMacBytes)) {
    return fail("a frame's MAC is wrong");
  }
  if (read_unsigned(frame + 4, 8) != next_received_) return fail("a frame is out of order");
  ++next_received_;
  if (state_ == State::kAwaitingProof) {
    state_ = State::kEstablished;
    return true;
  }
  Message message;
  if (!decode(frame + kFrameHeaderBytes, sealed_bytes - kFrameHeaderBytes, &message)) {
    return fail("a message is malformed");
  }
  on_message(user, message);
  return established();
}

bool Session::seal(const Message& message) noexcept {
  return established() && seal_frame(&message);
}

/// The client's proof: a frame without a message.
bool Session::seal_frame(const Message* message) noexcept {
  std::size_t message_bytes = message != nullptr ? kMessageHeaderBytes + message->body_bytes : 0;
  if (message_bytes > kMaxMessageBytes) return false;
  const std::size_t sealed_bytes = kFrameHeaderBytes + message_bytes;
  std::uint8_t* frame = outgoing_.room(sealed_bytes + kFrameMacBytes, kMaxOutgoingBytes);
  if (frame == nullptr) return false;
  if (message != nullptr &&
      encode(*message, frame + kFrameHeaderBytes, message_bytes) != message_bytes) {
    return false;
  }
  write_unsigned(message_bytes, 4, frame);
  write_unsigned(next_sent_, 8, frame + 4);
  std::uint8_t mac[kDigestBytes];
  mac_of_frame(keys_[static_cast<int>(role_)], frame, sealed_bytes, mac);
  std::copy(mac, mac + kFrameMacBytes, frame + sealed_bytes);
  outgoing_.add(sealed_bytes + kFrameMacBytes);
  ++next_sent_;
  return true;
}

const std::uint8_t* Session::pending(std::size_t* size) const noexcept {
  *size = outgoing_.size();
  return outgoing_.bytes();
}

void Session::mac_of_server(std::uint8_t* mac) const noexcept {
  const Piece pieces[] = {piece_of(kServerLabel), {proof_, sizeof proof_}, {nonce_, sizeof nonce_}};
  hmac_sha256(secret_.key, pieces, 3, mac);
}

void Session::derive_keys() noexcept {
  for (const Role sender : {Role::kClient, Role::kServer}) {
    const auto direction = static_cast<std::uint8_t>(sender);
    const Piece pieces[] = {
        piece_of(kSessionLabel), {proof_, sizeof proof_}, {nonce_, sizeof nonce_}, {&direction, 1}};
    hmac_sha256(secret_.key, pieces, 4, keys_[direction]);
  }
  explicit_bzero(secret_.key, sizeof secret_.key);
}

bool Session::fail(const char* problem) noexcept {
  reset();
  problem_ = problem;
  return false;
}

void Session::reset() noexcept {
  incoming_.reset();
  outgoing_.reset();
  comm_id_ = 0;
  next_sent_ = 0;
  next_received_ = 0;
  problem_ = nullptr;
  explicit_bzero(secret_.key, sizeof secret_.key);
  explicit_bzero(proof_, sizeof proof_);
  explicit_bzero(nonce_, sizeof nonce_);
  explicit_bzero(keys_, sizeof keys_);
  state_ = State::kClosed;
}

}  // namespace dynamiccl
