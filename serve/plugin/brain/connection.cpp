// The leader's sockets have time limits, so no call waits for ever.
#include "brain/connection.h"

#include <errno.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>

namespace dynamiccl {
namespace {

/// Of any message; the longest question that exists is shorter.
constexpr std::size_t kMaxBytes = std::size_t{1} << 20;
constexpr const char* kNoMessage = "it sends something that is no message";

const char* what_failed(ssize_t moved, std::size_t size) {
  if (moved == static_cast<ssize_t>(size)) return nullptr;
  if (moved == 0) return "it closed the connection";
  if (moved > 0) return "it stopped within a message";
  return errno == EAGAIN ? "it does not answer in time" : "the connection broke";
}

const char* receive_all(int socket, void* bytes, std::size_t size) {
  ssize_t got;
  do {
    got = recv(socket, bytes, size, MSG_WAITALL);
  } while (got < 0 && errno == EINTR);
  return what_failed(got, size);
}

template <typename Text>
void put_text(std::string* body, const Text& text) {
  put(body, static_cast<std::uint32_t>(text.size()));
  body->append(text.begin(), text.end());
}

std::string body_of(const BrainAsk& ask) {
  std::string body;
  put(&body, ask.num_nodes);
  put(&body, ask.num_ranks);
  put_text(&body, ask.artifact);
  put_text(&body, ask.system);
  put_text(&body, ask.table);
  put(&body, static_cast<std::uint32_t>(ask.tasks.size()));
  for (const TimedTask& task : ask.tasks) {
    put(&body, task.collective);
    put(&body, task.bin);
    put(&body, static_cast<std::uint32_t>(task.calls.size()));
    auto number = task.num_timed - static_cast<std::int64_t>(task.calls.size());
    for (TimedCall call : task.calls) {
      call.number = static_cast<std::uint8_t>(++number);
      put(&body, call);
    }
  }
  return body;
}

}  // namespace

const char* send_message(int socket, MessageKind kind, std::uint64_t number,
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

const char* receive_message(int socket, MessageHeader* header, std::string* body) {
  std::uint32_t size = 0;
  if (const char* problem = receive_all(socket, &size, sizeof size)) return problem;
  if (size < sizeof *header || size > kMaxBytes) return kNoMessage;
  body->resize(size);
  if (const char* problem = receive_all(socket, body->data(), size)) return problem;
  std::memcpy(header, body->data(), sizeof *header);
  body->erase(0, sizeof *header);
  const MessageHeader ours;
  if (std::memcmp(header->magic, ours.magic, sizeof ours.magic) != 0) return kNoMessage;
  return header->version == ours.version ? nullptr : "it speaks another version";
}

const char* why_not_peer(int socket) {
  ucred peer = {0, static_cast<uid_t>(-1), 0};  // nobody's, where the kernel does not tell
  socklen_t size = sizeof peer;
  getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size);
  return peer.uid == geteuid() ? nullptr : "it runs as another user";
}

BrainConnection::BrainConnection(const std::string& path, timeval limit)
    : path_(path), limit_(limit) {
  address_.sun_family = AF_UNIX;
  std::strncpy(address_.sun_path, path.c_str(), sizeof address_.sun_path - 1);
}

const char* BrainConnection::connect_now() {
  if (path_.size() >= sizeof address_.sun_path) return "its path is too long";
  socket_.reset(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int descriptor = socket_.descriptor();
  if (descriptor < 0) return "this process can have no more sockets";
  setsockopt(descriptor, SOL_SOCKET, SO_SNDTIMEO, &limit_, sizeof limit_);
  setsockopt(descriptor, SOL_SOCKET, SO_RCVTIMEO, &limit_, sizeof limit_);
  if (connect(descriptor, reinterpret_cast<const sockaddr*>(&address_), size_) != 0) {
    // As its queue of connections is full (man 7 unix).
    return errno == EAGAIN ? "it does not take the connection in time" : "nobody listens there";
  }
  return why_not_peer(descriptor);
}

const char* BrainConnection::exchange(const BrainAsk& ask, BrainAnswer* answer) {
  const char* problem = socket_.is_open() ? nullptr : connect_now();
  const int descriptor = socket_.descriptor();
  MessageHeader header;
  std::string body = body_of(ask);
  if (problem == nullptr) problem = send_message(descriptor, MessageKind::kAsk, ++number_, body);
  if (problem == nullptr) problem = receive_message(descriptor, &header, &body);
  if (problem != nullptr) return problem;
  if (header.number != number_) return "it answers another question";
  if (header.kind == MessageKind::kError) {
    answer->problem = body.empty() ? "it gives no reason" : body;
    for (char& c : answer->problem) {
      if (c < 0x20 || c > 0x7e) c = '?';  // it becomes a line of a log
    }
    return nullptr;
  }
  answer->table.assign(body.begin(), body.end());
  const bool fits = header.kind == MessageKind::kKeep
                        ? body.empty()
                        : header.kind == MessageKind::kTable && !body.empty();
  return fits && body.size() <= kMaxFileBytes ? nullptr : kNoMessage;
}

BrainAnswer BrainConnection::ask(const BrainAsk& ask) {
  BrainAnswer answer;
  if (const char* problem = exchange(ask, &answer)) {
    socket_.reset(-1);  // bytes left in it would be taken for the next answer
    answer = {problem, {}};
  }
  if (answer.problem.empty()) return answer;
  answer.problem = "brain" + (path_.empty() ? "" : " at " + path_) + ": " + answer.problem;
  return answer;
}

}  // namespace dynamiccl
