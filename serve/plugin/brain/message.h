// The messages between a leader and a brain, which is another process: dynamiccl-brain (torch/), or
// Python (serve/brain_server.py).
//
// Over a Unix stream socket, one connection for each communicator: the leader asks, the brain
// answers, one at a time. Numbers are little-endian, floats IEEE 754 doubles, texts UTF-8 without a
// zero. Of each message comes first how many bytes follow (uint32), then a MessageHeader, and then
//
// ask:    int32 num_nodes, int32 num_ranks
//         uint32 length, artifact directory;  uint32 length, system
//         uint32 length, table in force as a table file (0: NCCL's own choice everywhere)
//         uint32 number of tasks; each: int32 collective, int32 size bin, uint32 number of calls,
//           and so many TimedCalls, the oldest first
// table:  the whole next table as a table file (serve/table.py)
// keep:   nothing; the table in force stays
// error:  one line of text that says why there is no decision; the table in force stays
#pragma once

#include <errno.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "vocabulary.h"

namespace dynamiccl {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "numbers are sent as they lie in memory");

/// Calls of one task that a brain sees (WINDOW_LENGTH of datasets/features.py).
inline constexpr std::size_t kWindow = 8;
inline constexpr std::size_t kMaxArtifactBytes = 4096;
inline constexpr std::size_t kMaxSystemBytes = 200;

enum class MessageKind : std::uint32_t { kAsk = 1, kTable = 2, kKeep = 3, kError = 4 };

struct MessageHeader {
  char magic[8] = {'D', 'C', 'B', 'R', 'A', 'I', 'N', 0};
  std::uint32_t version = 1;
  MessageKind kind = MessageKind::kAsk;
  std::uint64_t number = 0;  // of the question; the answer repeats it
};
static_assert(sizeof(MessageHeader) == 24, "no gaps");

struct __attribute__((packed)) TimedCall {
  std::uint64_t size_bytes = 0;                                 // NCCL's nBytes
  double time_us = 0.0;                                         // minimum over ranks, more than 0
  double skew_us = -1.0, interference = -1.0;                   // -1: not known
  std::int8_t algorithm = -1, protocol = -1, num_channels = 0;  // really used; these: not known
  std::uint8_t number = 0;  // among the timed ones of its task, from 1 on, modulo 256 (0.1.0: 0)
};

/// One task key with timed calls. One that is not listed is decided as at the start of a job.
struct TimedTask {
  std::int32_t collective = 0;   // ncclFunc_t, 0 .. 4
  std::int32_t bin = 0;          // size bin (dynamiccl/sizes.py)
  std::int64_t num_timed = 0;    // so far, of which `calls` are the last; as read: modulo 256
  std::vector<TimedCall> calls;  // at most kWindow, the oldest first
};

struct BrainAsk {
  std::string artifact, system;  // its directory; as plugin.index names this machine
  std::uint32_t num_nodes = 0, num_ranks = 0;
  std::vector<std::uint8_t> table;  // in force; none: NCCL's own choice
  std::vector<TimedTask> tasks;
};

template <typename Value>
void put(std::string* bytes, const Value& value) {
  bytes->append(reinterpret_cast<const char*>(&value), sizeof value);
}

/// Of any message; the longest question that exists is shorter.
inline constexpr std::size_t kMostMessageBytes = std::size_t{1} << 20;
inline constexpr const char* kNoMessage = "it sends something that is no message";

/// Null where so many bytes were sent or received.
inline const char* what_failed(ssize_t moved, std::size_t size) {
  if (moved == static_cast<ssize_t>(size)) return nullptr;
  if (moved == 0) return "it closed the connection";
  if (moved > 0) return "it stopped within a message";
  return errno == EAGAIN ? "it does not answer in time" : "the connection broke";
}

// These wait as long as the socket's own time limits say. Null, or what failed; the connection is
// then of no more use.

inline const char* send_message(int socket, MessageKind kind, std::uint64_t number,
                                const std::string& body) {
  MessageHeader header;
  header.kind = kind;
  header.number = number;
  std::string bytes;
  put(&bytes, static_cast<std::uint32_t>(sizeof header + body.size()));
  put(&bytes, header);
  bytes += body;
  return what_failed(send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL), bytes.size());
}

inline const char* receive_message(int socket, MessageHeader* header, std::string* body) {
  const auto receive_all = [socket](void* bytes, std::size_t size) {
    ssize_t got;
    do got = recv(socket, bytes, size, MSG_WAITALL);
    while (got < 0 && errno == EINTR);
    return what_failed(got, size);
  };
  std::uint32_t size = 0;
  if (const char* problem = receive_all(&size, sizeof size)) return problem;
  if (size < sizeof *header || size > kMostMessageBytes) return kNoMessage;
  body->resize(size);
  if (const char* problem = receive_all(body->data(), size)) return problem;
  std::memcpy(header, body->data(), sizeof *header);
  body->erase(0, sizeof *header);
  const MessageHeader ours;
  if (std::memcmp(header->magic, ours.magic, sizeof ours.magic) != 0) return kNoMessage;
  return header->version == ours.version ? nullptr : "it speaks another version";
}

/// Null when the process at the other end belongs to this user, else why not.
inline const char* why_not_peer(int socket) {
  ucred peer = {0, static_cast<uid_t>(-1), 0};  // nobody's, where the kernel does not tell
  socklen_t size = sizeof peer;
  getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size);
  return peer.uid == geteuid() ? nullptr : "it runs as another user";
}

}  // namespace dynamiccl
