// Sessions that nobody disturbs: what one end seals the other delivers, however the bytes are cut.
#include <malloc.h>

#include <random>

#include "tests/check.h"
#include "tests/conversation.h"

using namespace dynamiccl;

namespace {

using Role = Session::Role;

void handshake() {
  End client;
  End server;
  CHECK(server.begin(Role::kServer) && server.take().empty());
  CHECK(client.begin(Role::kClient));
  CHECK(!client.session.seal(numbered(1)) && !server.session.seal(numbered(1)));
  const Bytes hello = client.take();
  CHECK(hello.size() == kClientHelloBytes && client.take().empty());
  CHECK(server.receive(hello) && server.session.comm_id() == kCommId);
  CHECK(!server.session.established() && !server.session.seal(numbered(1)));
  const Bytes answer = server.take();
  CHECK(answer.size() == kServerHelloBytes);
  CHECK(client.receive(answer) && client.session.established());
  CHECK(client.session.seal(numbered(1)));  // travels with the proof
  CHECK(server.receive(client.take()) && server.session.established());
  CHECK(server.delivered.size() == 1 && server.delivered[0] == encoded(numbered(1)));
  CHECK(server.session.seal(numbered(2)) && client.receive(server.take()));
  CHECK(client.delivered.size() == 1 && client.delivered[0] == encoded(numbered(2)));
  CHECK(client.session.problem() == nullptr && server.session.problem() == nullptr);
}

/// The bytes are those that session.h describes.
void format() {
  Peer peer;
  End server;
  CHECK(server.begin(Role::kServer) && server.receive(peer.client_hello()));
  CHECK(server.take() == peer.server_hello());
  CHECK(server.receive(peer.frame(0, 0, {})));
  CHECK(server.receive(peer.frame(0, 1, encoded(numbered(7)))));
  CHECK(server.delivered.size() == 1 && server.delivered[0] == encoded(numbered(7)));
  CHECK(server.session.seal(numbered(8)) && server.session.seal(numbered(9)));
  Bytes sealed = peer.frame(1, 1, encoded(numbered(8)));
  append(&sealed, peer.frame(1, 2, encoded(numbered(9))));
  CHECK(server.take() == sealed);
  End client;
  CHECK(client.begin(Role::kClient) && client.take() == peer.client_hello());
  CHECK(client.receive(peer.server_hello()) && client.take() == peer.frame(0, 0, {}));
  CHECK(client.receive(sealed) && client.delivered.size() == 2);
}

void any_split() {
  std::mt19937 random(5);
  const Bytes large(kMaxBodyBytes, 0x5a);
  for (const std::size_t step : {1UL, 2UL, 3UL, 11UL, 12UL, 13UL, 83UL, 84UL, 85UL, 1000UL,
                                 49'235UL, 49'236UL, 49'237UL, SIZE_MAX}) {
    Pair pair;
    CHECK(pair.connect(step));
    std::vector<Bytes> sealed;
    for (std::uint64_t i = 0; i < 12; ++i) {
      const Bytes body(large.begin(), large.begin() + static_cast<std::ptrdiff_t>(random() % 200));
      const Message message = numbered(i, i == 5 ? large : body);
      CHECK(pair.client.session.seal(message) && pair.server.session.seal(message));
      sealed.push_back(encoded(message));
    }
    CHECK(pair.server.receive(pair.client.take(), step) && pair.server.delivered == sealed);
    CHECK(pair.client.receive(pair.server.take(), step) && pair.client.delivered == sealed);
  }
  Pair pair;
  CHECK(pair.connect());
  std::vector<Bytes> sealed;
  for (std::uint64_t round = 0; round < 300; ++round) {  // cut anywhere, sent in any amounts
    const Bytes body(random() % 3000, static_cast<std::uint8_t>(round));
    CHECK(pair.client.session.seal(numbered(round, body)));
    sealed.push_back(encoded(numbered(round, body)));
    std::size_t size = 0;
    const std::uint8_t* bytes = pair.client.session.pending(&size);
    size = round == 299 ? size : random() % (size + 1);
    CHECK(pair.server.receive(Bytes(bytes, bytes + size), 1 + random() % 500));
    pair.client.session.sent(size);
  }
  CHECK(pair.server.delivered == sealed);
}

void outgoing_is_bounded() {
  Pair pair;
  CHECK(pair.connect());
  const Bytes body(kMaxBodyBytes);
  std::uint64_t count = 0;
  while (pair.client.session.seal(numbered(count, body))) ++count;
  CHECK(count == kMaxOutgoingBytes / kMaxFrameBytes);
  while (pair.client.session.seal(numbered(count))) ++count;  // small ones still fit
  std::size_t size = 0;
  pair.client.session.pending(&size);
  CHECK(size <= kMaxOutgoingBytes &&
        size + kFrameHeaderBytes + kMessageHeaderBytes + kFrameMacBytes > kMaxOutgoingBytes);
  CHECK(pair.client.session.established());
  CHECK(pair.server.receive(pair.client.take()) && pair.server.delivered.size() == count);
  CHECK(pair.client.session.seal(numbered(count)) && pair.server.receive(pair.client.take()));
  CHECK(pair.server.delivered.back() == encoded(numbered(count)));
}

void unsound_messages_are_not_sealed() {
  Pair pair;
  CHECK(pair.connect());
  const Bytes body(kMaxBodyBytes + 1);
  CHECK(!pair.client.session.seal(numbered(1, body)));
  Message message = numbered(1);
  message.body_bytes = 0xffffffff;
  CHECK(!pair.client.session.seal(message));
  message = numbered(1);
  message.rank = -2;
  CHECK(!pair.client.session.seal(message) && pair.client.take().empty());
  CHECK(pair.client.session.seal(numbered(2)) && pair.server.receive(pair.client.take()));
  CHECK(pair.server.delivered.size() == 1);
}

void move_and_reset() {
  Pair pair;
  CHECK(pair.connect());
  CHECK(pair.client.session.seal(numbered(1, Bytes(500))));
  const Bytes half_sealed = pair.client.take();
  CHECK(pair.server.receive({half_sealed.begin(), half_sealed.begin() + 300}));
  CHECK(pair.server.session.seal(numbered(2)));
  Session moved(std::move(pair.server.session));
  CHECK(!pair.server.session.established() && pair.server.take().empty());
  CHECK(!pair.server.session.receive(half_sealed.data(), 1, End::deliver, &pair.server));
  pair.server.session = std::move(moved);
  Session& itself = pair.server.session;
  pair.server.session = std::move(itself);
  CHECK(pair.server.session.comm_id() == kCommId);
  CHECK(pair.server.receive({half_sealed.begin() + 300, half_sealed.end()}));
  CHECK(pair.server.delivered.size() == 1);
  CHECK(pair.client.receive(pair.server.take()) && pair.client.delivered.size() == 1);
  pair.client.session.reset();
  CHECK(!pair.client.session.established() && pair.client.session.comm_id() == 0);
  CHECK(!pair.client.session.seal(numbered(3)) && !pair.client.receive({0}));
  CHECK(pair.connect());  // begun again
  Session half_way;
  CHECK(half_way.begin(Role::kClient, secret_of_tests(), 1, kClientNonce));
  half_way = Session();
}

void callback_may_seal_and_reset() {
  Pair pair;
  CHECK(pair.connect());
  for (std::uint64_t i = 0; i < 3; ++i) CHECK(pair.client.session.seal(numbered(i)));
  const Bytes sealed = pair.client.take();
  const auto echo = [](void* user, const Message& message) {
    CHECK(static_cast<Session*>(user)->seal(message));
  };
  Session& server = pair.server.session;
  CHECK(server.receive(sealed.data(), sealed.size(), echo, &server));
  CHECK(pair.client.receive(pair.server.take()) && pair.client.delivered.size() == 3);
  for (const std::size_t first : {1UL, 84UL}) {  // in a buffer of its own, and in place
    CHECK(pair.connect());
    CHECK(pair.client.session.seal(numbered(1)) && pair.client.session.seal(numbered(2)));
    const Bytes two = pair.client.take();
    int calls = 0;
    struct Target {
      Session* session;
      int* calls;
    } target = {&server, &calls};
    const auto stop = [](void* user, const Message&) {
      ++*static_cast<Target*>(user)->calls;
      static_cast<Target*>(user)->session->reset();
    };
    const bool first_went = server.receive(two.data(), first, stop, &target);
    CHECK(first_went == (first == 1));
    if (first_went) CHECK(!server.receive(two.data() + 1, two.size() - 1, stop, &target));
    CHECK(calls == 1 && !server.established());
  }
}

void idle_sessions_are_small() {
  CHECK(sizeof(Session) <= 320);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  Pair pair;
  const auto in_use = [] { return mallinfo2().uordblks; };
  const std::size_t before = in_use();
  CHECK(pair.connect());
  CHECK(pair.client.session.seal(numbered(1)) && pair.server.receive(pair.client.take(), 1));
  pair.server.delivered = {};
  CHECK(in_use() == before);
#endif
}

}  // namespace

int main() {
  handshake();
  format();
  any_split();
  outgoing_is_bounded();
  unsound_messages_are_not_sealed();
  move_and_reset();
  callback_may_seal_and_reset();
  idle_sessions_are_small();
  return g_failures;
}
