// Two sessions that talk through memory, for tests and fuzzing, and a second implementation of the
// handshake, from its description, that can also seal what a session never would.
#pragma once

#include <cstring>
#include <vector>

#include "adaptive/wire/session.h"
#include "crypto/sha256.h"

using Bytes = std::vector<std::uint8_t>;

inline dynamiccl::Secret secret_of_tests() {
  dynamiccl::Secret secret = {};
  for (std::size_t i = 0; i < sizeof secret.key; ++i) secret.key[i] = static_cast<std::uint8_t>(i);
  secret.job = 0x1122334455667788;
  secret.restart = 3;
  return secret;
}

inline constexpr std::uint64_t kCommId = 0xc0113c7;
inline constexpr std::uint8_t kClientNonce[dynamiccl::kNonceBytes] = {'c', 1, 2, 3};
inline constexpr std::uint8_t kServerNonce[dynamiccl::kNonceBytes] = {'s', 4, 5, 6};

/// A message to tell from others by its `index`; it points into `body`.
inline dynamiccl::Message numbered(std::uint64_t index, const Bytes& body = {}) {
  dynamiccl::Message message;
  message.kind = dynamiccl::MessageKind::kVote;
  message.rank = 1;
  message.comm_id = kCommId;
  message.index = index;
  message.body = body.data();
  message.body_bytes = static_cast<std::uint32_t>(body.size());
  return message;
}

inline Bytes encoded(const dynamiccl::Message& message) {
  Bytes bytes(dynamiccl::kMessageHeaderBytes + message.body_bytes);
  bytes.resize(dynamiccl::encode(message, bytes.data(), bytes.size()));
  return bytes;
}

/// A session and the encoded messages that it delivered.
struct End {
  dynamiccl::Session session;
  std::vector<Bytes> delivered;

  bool begin(dynamiccl::Session::Role role, const dynamiccl::Secret& secret = secret_of_tests(),
             std::uint64_t comm_id = kCommId) {
    const bool client = role == dynamiccl::Session::Role::kClient;
    return session.begin(role, secret, comm_id, client ? kClientNonce : kServerNonce);
  }

  /// Receives in parts of `step` bytes.
  bool receive(const Bytes& bytes, std::size_t step = SIZE_MAX) {
    for (std::size_t i = 0; i < bytes.size();) {
      const std::size_t size = step < bytes.size() - i ? step : bytes.size() - i;
      // A copy that is just as long, so that AddressSanitizer sees every read beyond.
      const Bytes part(bytes.begin() + static_cast<std::ptrdiff_t>(i),
                       bytes.begin() + static_cast<std::ptrdiff_t>(i + size));
      if (!session.receive(part.data(), part.size(), deliver, this)) return false;
      i += size;
    }
    return true;
  }

  /// Takes all that waits to be sent.
  Bytes take() {
    std::size_t size = 0;
    const std::uint8_t* bytes = session.pending(&size);
    const Bytes taken(bytes, bytes + size);
    session.sent(size);
    return taken;
  }

  static void deliver(void* user, const dynamiccl::Message& message) {
    static_cast<End*>(user)->delivered.push_back(encoded(message));
  }
};

struct Pair {
  End client;
  End server;

  /// A handshake; `step` as in End::receive.
  bool connect(std::size_t step = SIZE_MAX) {
    return client.begin(dynamiccl::Session::Role::kClient) &&
           server.begin(dynamiccl::Session::Role::kServer) && server.receive(client.take(), step) &&
           client.receive(server.take(), step) && server.receive(client.take(), step) &&
           client.session.established() && server.session.established();
  }
};

inline void append_number(Bytes* bytes, std::uint64_t value, int size) {
  for (int i = 0; i < size; ++i) bytes->push_back(static_cast<std::uint8_t>(value >> (8 * i)));
}

inline Bytes mac_of(const std::uint8_t* key, const char* label, const Bytes& text) {
  Bytes mac(dynamiccl::kDigestBytes);
  const dynamiccl::Piece pieces[] = {{label, std::strlen(label)}, {text.data(), text.size()}};
  const auto& whole = *reinterpret_cast<const std::uint8_t (*)[dynamiccl::kDigestBytes]>(key);
  dynamiccl::hmac_sha256(whole, pieces, 2, mac.data());
  return mac;
}

inline void append(Bytes* bytes, const Bytes& more) {
  bytes->insert(bytes->end(), more.begin(), more.end());
}

/// The other end as session.h describes it; without any checks.
struct Peer {
  dynamiccl::Secret secret = secret_of_tests();
  std::uint64_t comm_id = kCommId;
  std::uint32_t version = 1;
  Bytes proof;
  Bytes keys[2];  // of client, of server

  Bytes client_hello() {
    proof = {'D', 'C', 'W', 'I', 'R', 'E', '\r', '\n'};
    append_number(&proof, version, 4);
    append_number(&proof, secret.restart, 4);
    append_number(&proof, secret.job, 8);
    append_number(&proof, comm_id, 8);
    proof.insert(proof.end(), kClientNonce, kClientNonce + 16);
    Bytes hello = proof;
    append(&hello, mac_of(secret.key, "dynamiccl-client", proof));
    return hello;
  }

  /// The server's answer to the hello above; both ends then know the keys.
  Bytes server_hello() {
    Bytes text = proof;
    text.insert(text.end(), kServerNonce, kServerNonce + 16);
    for (int direction = 0; direction < 2; ++direction) {
      text.push_back(static_cast<std::uint8_t>(direction));
      keys[direction] = mac_of(secret.key, "dynamiccl-session", text);
      text.pop_back();
    }
    Bytes hello(kServerNonce, kServerNonce + 16);
    append(&hello, mac_of(secret.key, "dynamiccl-server", text));
    return hello;
  }

  /// A frame with a good MAC, whatever it holds.
  Bytes frame(int direction, std::uint64_t counter, const Bytes& message) const {
    Bytes frame;
    append_number(&frame, message.size(), 4);
    append_number(&frame, counter, 8);
    append(&frame, message);
    const Bytes mac = mac_of(keys[direction].data(), "", frame);
    frame.insert(frame.end(), mac.begin(), mac.begin() + dynamiccl::kFrameMacBytes);
    return frame;
  }
};
