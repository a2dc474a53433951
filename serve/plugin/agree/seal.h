// Messages of the vote under the installed key: SipHash-2-4 (Aumasson and Bernstein, 2012) over the
// message, its round and the rank's nonce; a confirmation holds the arbiter's question too. Who
// lacks the key, or repeats what it has heard, can at most make us abstain.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "agree/vote.h"

namespace dynamiccl {

struct Key {
  std::uint64_t low = 0;
  std::uint64_t high = 0;
};

/// SipHash-2-4 of `size` bytes.
inline std::uint64_t siphash(const Key& key, const void* bytes, std::size_t size) noexcept {
  std::uint64_t v[4] = {key.low ^ 0x736f6d6570736575U, key.high ^ 0x646f72616e646f6dU,
                        key.low ^ 0x6c7967656e657261U, key.high ^ 0x7465646279746573U};
  // v[add_to] += v[from], and v[from] is rotated and mixed with the sum.
  const auto mix = [&v](int add_to, int from, int bits) {
    v[add_to] += v[from];
    v[from] = (v[from] << bits | v[from] >> (64 - bits)) ^ v[add_to];
  };
  const auto rounds = [&v, &mix](int count) {
    for (int i = 0; i < count; ++i) {
      mix(0, 1, 13), mix(2, 3, 16);
      v[0] = v[0] << 32 | v[0] >> 32;
      mix(2, 1, 17), mix(0, 3, 21);
      v[2] = v[2] << 32 | v[2] >> 32;
    }
  };
  for (std::size_t at = 0; at <= size; at += 8) {
    std::uint64_t word = size - at < 8 ? std::uint64_t{size} << 56 : 0;
    if (size > 0) {
      std::memcpy(&word, static_cast<const char*>(bytes) + at, std::min<std::size_t>(8, size - at));
    }
    v[3] ^= word;
    rounds(2);
    v[0] ^= word;
  }
  v[2] ^= 0xff;
  rounds(4);
  return v[0] ^ v[1] ^ v[2] ^ v[3];
}

inline std::uint64_t mac_of(const Key& key, const Vote& vote) noexcept {
  return siphash(key, &vote, offsetof(Vote, mac));
}

/// Of a reply to the rank that sent `vote`.
inline std::uint64_t mac_of(const Key& key, const Reply& reply, const Vote& vote) noexcept {
  const std::uint64_t to[] = {vote.round.job, vote.round.comm, vote.round.number, vote.nonce};
  unsigned char bytes[offsetof(Reply, mac) + sizeof to];
  std::memcpy(bytes, &reply, offsetof(Reply, mac));
  std::memcpy(bytes + offsetof(Reply, mac), to, sizeof to);
  return siphash(key, bytes, sizeof bytes);
}

/// Whether received bytes are a reply under this key: known numbers, a zero-terminated text.
inline bool is_sound(const Key& key, const Reply& reply, const Vote& vote) noexcept {
  return reply.magic == kVoteMagic && reply.kind >= ReplyKind::kStillThere &&
         reply.kind <= ReplyKind::kStranger && reply.change <= Change::kNewTable &&
         reply.body_bytes <= kMostBodyBytes && reply.reason[sizeof reply.reason - 1] == '\0' &&
         reply.mac == mac_of(key, reply, vote);
}

}  // namespace dynamiccl
