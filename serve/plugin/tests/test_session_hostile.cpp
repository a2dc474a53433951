// Whoever stands between two ranks, or only pretends to be one: a session delivers what the other
// end sealed, in its order and from the first on, or ends.
#include <random>
#include <string>

#include "tests/check.h"
#include "tests/conversation.h"

using namespace dynamiccl;

namespace {

using Role = Session::Role;

/// Everything that went over a connection: to the server, to the client.
struct Recording {
  Bytes to_server[2];  // before the server's answer, and after it
  Bytes to_client[2];  // the answer, and what follows
  std::vector<Bytes> sealed;

  Recording() {
    Pair pair;
    CHECK(pair.client.begin(Role::kClient) && pair.server.begin(Role::kServer));
    to_server[0] = pair.client.take();
    CHECK(pair.server.receive(to_server[0]));
    to_client[0] = pair.server.take();
    CHECK(pair.client.receive(to_client[0]));
    for (std::uint64_t i = 0; i < 4; ++i) {
      const Bytes body(5 * i, static_cast<std::uint8_t>(i));
      const Message message = numbered(i, body);
      CHECK(pair.client.session.seal(message));
      sealed.push_back(encoded(message));
    }
    to_server[1] = pair.client.take();
    CHECK(pair.server.receive(to_server[1]) && pair.server.delivered == sealed);
    for (std::uint64_t i = 0; i < 4; ++i) {
      CHECK(pair.server.session.seal(numbered(i, Bytes(5 * i, static_cast<std::uint8_t>(i)))));
    }
    to_client[1] = pair.server.take();
    CHECK(pair.client.receive(to_client[1]) && pair.client.delivered == sealed);
  }

  /// What one role hears in all.
  Bytes heard_by(Role role) const {
    Bytes all = role == Role::kServer ? to_server[0] : to_client[0];
    append(&all, role == Role::kServer ? to_server[1] : to_client[1]);
    return all;
  }
};

/// Plays bytes to a fresh end with the nonces of the recording. The same nonces twice would never
/// happen; here they are what lets the recorded MACs hold.
End played(Role role, const Bytes& bytes, bool* went, std::size_t step = SIZE_MAX) {
  End end;
  CHECK(end.begin(role));
  *went = end.receive(bytes, step);
  CHECK((end.session.problem() == nullptr) == *went);
  return end;
}

bool is_prefix(const std::vector<Bytes>& some, const std::vector<Bytes>& all) {
  return some.size() <= all.size() && std::equal(some.begin(), some.end(), all.begin());
}

/// The size of the frame that begins at `offset`.
std::size_t frame_size(const Bytes& bytes, std::size_t offset) {
  return kFrameHeaderBytes + bytes[offset] + 256UL * bytes[offset + 1] + kFrameMacBytes;
}

void truncation(const Recording& recording) {
  for (const Role role : {Role::kClient, Role::kServer}) {
    const Bytes all = recording.heard_by(role);
    for (std::size_t size = 0; size <= all.size(); ++size) {
      bool went = false;
      const End end =
          played(role, {all.begin(), all.begin() + static_cast<std::ptrdiff_t>(size)}, &went);
      CHECK(went && is_prefix(end.delivered, recording.sealed));
      CHECK((end.delivered.size() == 4) == (size == all.size()));
    }
  }
}

void every_flipped_bit(const Recording& recording) {
  for (const Role role : {Role::kClient, Role::kServer}) {
    const Bytes all = recording.heard_by(role);
    for (std::size_t bit = 0; bit < 8 * all.size(); ++bit) {
      Bytes flipped = all;
      flipped[bit / 8] ^= static_cast<std::uint8_t>(1 << bit % 8);
      for (const std::size_t step : {1UL, SIZE_MAX}) {
        bool went = false;
        const End end = played(role, flipped, &went, step);
        CHECK(is_prefix(end.delivered, recording.sealed) && end.delivered.size() < 4);
        std::size_t waiting = 0;
        end.session.pending(&waiting);
        const bool in_hello =
            bit / 8 < (role == Role::kServer ? kClientHelloBytes : kServerHelloBytes);
        CHECK(!in_hello || (!went && waiting == 0 && end.delivered.empty()));
      }
    }
  }
}

/// Frames twice, left out, exchanged; none of it gets through.
void replay_and_reordering(const Recording& recording) {
  for (const Role role : {Role::kClient, Role::kServer}) {
    const Bytes& frames = role == Role::kServer ? recording.to_server[1] : recording.to_client[1];
    const Bytes& hello = role == Role::kServer ? recording.to_server[0] : recording.to_client[0];
    std::vector<Bytes> parts;
    for (std::size_t i = 0; i < frames.size(); i += parts.back().size()) {
      const auto begin = frames.begin() + static_cast<std::ptrdiff_t>(i);
      parts.emplace_back(begin, begin + static_cast<std::ptrdiff_t>(frame_size(frames, i)));
    }
    const std::size_t count = parts.size();
    for (std::size_t i = 0; i < count; ++i) {
      for (std::size_t j = 0; j < count; ++j) {
        if (i == j) continue;
        Bytes bytes = hello;
        for (std::size_t k = 0; k < count; ++k) append(&bytes, parts[k == i ? j : k]);
        append(&bytes, parts[j]);
        bool went = true;
        const End end = played(role, bytes, &went);
        CHECK(!went && is_prefix(end.delivered, recording.sealed) && end.delivered.size() < 4);
      }
      Bytes again = hello;
      append(&again, frames);
      append(&again, parts[i]);
      bool went = true;
      CHECK(played(role, again, &went).delivered == recording.sealed && !went);
    }
  }
}

/// A recorded conversation to an end with a fresh nonce of its own.
void replay_to_another_connection(const Recording& recording) {
  const std::uint8_t fresh[kNonceBytes] = {'f'};
  End server;
  CHECK(server.session.begin(Role::kServer, secret_of_tests(), 0, fresh));
  CHECK(server.receive(recording.to_server[0]));  // he heard this, and may say it
  CHECK(!server.session.established() && !server.session.seal(numbered(1)));
  CHECK(!server.receive(recording.to_server[1]) && server.delivered.empty());
  CHECK(std::string(server.session.problem()) == "a frame's MAC is wrong");
  End client;
  CHECK(client.session.begin(Role::kClient, secret_of_tests(), kCommId, fresh));
  client.take();
  CHECK(!client.receive(recording.to_client[0]) && client.take().empty());
}

void reflection(const Recording& recording) {
  for (const std::size_t step : {1UL, SIZE_MAX}) {
    bool went = true;
    CHECK(played(Role::kClient, recording.heard_by(Role::kServer), &went, step).delivered.empty());
    CHECK(!went);
    CHECK(played(Role::kServer, recording.heard_by(Role::kClient), &went, step).delivered.empty());
    CHECK(!went);
    // Established, and then its own frames come back.
    Bytes own = recording.to_client[0];
    append(&own, {recording.to_server[1].begin() + 28, recording.to_server[1].end()});
    CHECK(played(Role::kClient, own, &went, step).delivered.empty() && !went);
    own = recording.to_server[0];
    append(&own, {recording.to_server[1].begin(), recording.to_server[1].begin() + 28});
    append(&own, recording.to_client[1]);
    CHECK(played(Role::kServer, own, &went, step).delivered.empty() && !went);
  }
}

void another_job() {
  const auto refused = [](const Secret& secret, const char* why) {
    End client;
    End server;
    CHECK(client.begin(Role::kClient, secret) && server.begin(Role::kServer));
    CHECK(!server.receive(client.take()) && server.take().empty());
    const bool said = std::string(server.session.problem()) == why;
    Peer peer;  // and a server that would answer nevertheless
    peer.secret = secret;
    peer.client_hello();
    CHECK(client.begin(Role::kClient) && !client.receive(peer.server_hello()));
    return said;
  };
  Secret other = secret_of_tests();
  ++other.job;
  CHECK(refused(other, "it is of another job"));
  other = secret_of_tests();
  ++other.restart;
  CHECK(refused(other, "it is of another restart of this job"));
  other = secret_of_tests();
  other.key[31] ^= 1;
  CHECK(refused(other, "it has another key"));
  Peer peer;
  peer.version = 2;
  End server;
  CHECK(server.begin(Role::kServer) && !server.receive(peer.client_hello()));
  CHECK(std::string(server.session.problem()) == "its protocol has another version");
  // A server that answers for another communicator than the one that was asked for.
  peer = Peer();
  peer.comm_id = kCommId + 1;
  peer.client_hello();
  End client;
  CHECK(client.begin(Role::kClient) && !client.receive(peer.server_hello()));
}

/// Good MACs over what a session never sends: from a rank of another build, say.
void sealed_nonsense() {
  const Bytes good = encoded(numbered(1));
  const auto outcome = [](const std::vector<std::pair<std::uint64_t, Bytes>>& frames) {
    Peer peer;
    End server;
    Bytes bytes = peer.client_hello();
    peer.server_hello();
    CHECK(server.begin(Role::kServer));
    for (const auto& [counter, message] : frames) append(&bytes, peer.frame(0, counter, message));
    return std::string(server.receive(bytes) ? "" : server.session.problem());
  };
  CHECK(outcome({{0, {}}, {1, good}, {2, good}}).empty());
  CHECK(outcome({{1, {}}}) == "a frame is out of order");
  CHECK(outcome({{0, good}}) == "a frame has an impossible size");  // no proof
  CHECK(outcome({{0, {}}, {0, good}}) == "a frame is out of order");
  CHECK(outcome({{0, {}}, {2, good}}) == "a frame is out of order");
  CHECK(outcome({{0, {}}, {1ULL << 32 | 1, good}}) == "a frame is out of order");
  CHECK(outcome({{0, {}}, {1, good}, {1, good}}) == "a frame is out of order");
  CHECK(outcome({{0, {}}, {1, {}}}) == "a frame has an impossible size");
  CHECK(outcome({{0, {}}, {1, Bytes(55)}}) == "a frame has an impossible size");
  CHECK(outcome({{0, {}}, {1, Bytes(56)}}) == "a message is malformed");
  CHECK(outcome({{0, {}}, {1, Bytes(kMaxMessageBytes)}}) == "a message is malformed");
  CHECK(outcome({{0, {}}, {1, Bytes(kMaxMessageBytes + 1)}}) == "a frame has an impossible size");
}

/// A size is refused as soon as it is there, before anything is held for it.
void impossible_sizes() {
  for (const std::uint64_t size :
       {0ULL, 1ULL, 55ULL, kMaxMessageBytes + 1ULL, 0x7fffffffULL, 0x80000000ULL, 0xffffffffULL}) {
    for (const std::size_t step : {1UL, SIZE_MAX}) {
      Pair pair;
      CHECK(pair.connect());
      Bytes header;
      append_number(&header, size, 4);
      append_number(&header, 1, 8);
      CHECK(!pair.client.receive(header, step) && !pair.server.receive(header, step));
    }
  }
}

void strangers() {
  for (const char* text :
       {"GET / HTTP/1.1\r\n", "SSH-2.0-OpenSSH\r\n", "\x16\x03\x01", "\n", "DCWIRE\n"}) {
    End server;
    CHECK(server.begin(Role::kServer));
    const Bytes bytes(text, text + std::strlen(text));
    CHECK(!server.receive(bytes) && server.take().empty());
    CHECK(!server.receive(bytes) && !server.session.seal(numbered(1)));  // stays closed
    CHECK(std::string(server.session.problem()) == "it does not speak our protocol");
  }
}

#if defined(__SANITIZE_THREAD__)
constexpr int kNumGarbage = 10'000;  // one thread, and ten times as slow
#else
constexpr int kNumGarbage = 100'000;
#endif

void garbage(const Recording& recording) {
  std::mt19937_64 random(9);
  const Bytes to_server = recording.heard_by(Role::kServer);
  const Bytes to_client = recording.heard_by(Role::kClient);
  for (int i = 0; i < kNumGarbage; ++i) {
    const Role role = i % 2 == 0 ? Role::kServer : Role::kClient;
    // From the start, after the magic, after the hello, after the handshake.
    const Bytes& all = role == Role::kServer ? to_server : to_client;
    const std::size_t known[] = {0, 8, role == Role::kServer ? 80UL : 48UL,
                                 role == Role::kServer ? 108UL : 48UL};
    Bytes bytes(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(known[i / 2 % 4]));
    const std::size_t more = random() % 200;
    for (std::size_t j = 0; j < more; ++j) bytes.push_back(static_cast<std::uint8_t>(random()));
    if (i % 3 == 0 && bytes.size() > known[i / 2 % 4] + 4) {  // a size that is possible
      bytes[known[i / 2 % 4] + 1] = bytes[known[i / 2 % 4] + 2] = bytes[known[i / 2 % 4] + 3] = 0;
    }
    bool went = false;
    CHECK(played(role, bytes, &went, 1 + random() % 100).delivered.empty());
  }
}

}  // namespace

int main() {
  const Recording recording;
  truncation(recording);
  every_flipped_bit(recording);
  replay_and_reordering(recording);
  replay_to_another_connection(recording);
  reflection(recording);
  another_job();
  sealed_nonsense();
  impossible_sizes();
  strangers();
  garbage(recording);
  return g_failures;
}
