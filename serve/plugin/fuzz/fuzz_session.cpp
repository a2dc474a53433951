// Sessions: the first byte of an input chooses the roles, the second how bytes are split.
#include "fuzz/input.h"
#include "tests/conversation.h"

using namespace dynamiccl;

namespace {

using Role = Session::Role;

bool is_prefix(const std::vector<Bytes>& some, const std::vector<Bytes>& all) {
  return some.size() <= all.size() && std::equal(some.begin(), some.end(), all.begin());
}

/// The messages of the conversation that the seeds hold.
const std::vector<Bytes>& known_messages() {
  static const std::vector<Bytes> messages = {encoded(numbered(0)), encoded(numbered(1)),
                                              encoded(numbered(2))};
  return messages;
}

/// An attacker without the key who may replay a recorded conversation: nothing gets delivered.
void raw_bytes(Role role, std::size_t step, Input* input) {
  End end;
  REQUIRE(end.begin(role));
  end.receive(input->rest(), step);
  REQUIRE(is_prefix(end.delivered, known_messages()));
}

/// A peer with the key that seals arbitrary bytes.
void sealed_bytes(Role role, std::size_t step, Input* input) {
  Peer peer;
  End end;
  Bytes stream = peer.client_hello();
  const Bytes answer = peer.server_hello();
  const int sender = role == Role::kServer ? 0 : 1;
  if (sender == 0) {
    append(&stream, peer.frame(0, 0, {}));
  } else {
    stream = answer;
  }
  std::vector<Bytes> good;
  std::uint64_t counter = 0;
  bool went_wrong = false;
  while (!input->empty()) {
    counter += 1 + static_cast<std::uint64_t>(input->number(1) == 0xff);
    const Bytes message = input->bytes(input->number(2));
    append(&stream, peer.frame(sender, counter, message));
    Message decoded;
    went_wrong |= counter != good.size() + 1 || !decode(message.data(), message.size(), &decoded);
    if (!went_wrong) good.push_back(message);
  }
  REQUIRE(end.begin(role));
  REQUIRE(end.receive(stream, step) == !went_wrong);
  REQUIRE(end.delivered == good);
}

/// Two sessions, and an attacker on the wire between them.
class Wire {
 public:
  explicit Wire(std::size_t step) : step_(step) {
    REQUIRE(ends_[0].begin(Role::kClient) && ends_[1].begin(Role::kServer));
  }

  void act(Input* input) {
    const std::uint64_t what = input->number(1);
    const std::size_t from = what >> 7;
    Bytes& wire = wires_[from];
    switch (what % 8) {
      case 0:
        seal(from, input->number(1));
        break;
      case 1:
      case 2:
        append(&wire, ends_[from].take());
        break;
      case 3:
        deliver(from, input->number(1));
        break;
      case 4:
        deliver(from, wire.size());
        break;
      case 5:
        alter(&wire, input);
        break;
      case 6:  // back to the sender
        if (wire.size() + wires_[1 - from].size() > kMaxWireBytes) break;
        append(&wires_[1 - from], wire);
        tampered_ |= !wire.empty();
        break;
      default:
        tampered_ |= !wire.empty();
        wire.clear();
    }
  }

  /// Delivers everything in flight; without tampering it is all that was sealed.
  void finish() {
    for (int round = 0; round < 4; ++round) {
      for (std::size_t from = 0; from < 2; ++from) {
        append(&wires_[from], ends_[from].take());
        deliver(from, wires_[from].size());
      }
    }
    for (std::size_t from = 0; from < 2; ++from) {
      REQUIRE(is_prefix(ends_[1 - from].delivered, sealed_[from]));
      if (tampered_) continue;
      REQUIRE(ends_[from].session.established());
      REQUIRE(ends_[1 - from].delivered == sealed_[from]);
    }
  }

 private:
  static constexpr std::size_t kMaxWireBytes = 1 << 16;

  /// Mostly short bodies, since hashing takes all the time, but the longest ones as well.
  void seal(std::size_t from, std::size_t choice) {
    const std::size_t body_bytes = choice < 250 ? choice : kMaxBodyBytes + 253 - choice;
    const Bytes body(body_bytes, static_cast<std::uint8_t>(choice));
    const Message message = numbered(sealed_[from].size(), body);
    if (ends_[from].session.seal(message)) sealed_[from].push_back(encoded(message));
  }

  void deliver(std::size_t from, std::size_t size) {
    Bytes& wire = wires_[from];
    const auto end = wire.begin() + static_cast<std::ptrdiff_t>(std::min(size, wire.size()));
    const Bytes part(wire.begin(), end);
    wire.erase(wire.begin(), end);
    if (!ends_[1 - from].receive(part, step_)) REQUIRE(tampered_);
  }

  void alter(Bytes* wire, Input* input) {
    if (wire->empty()) return;
    const std::size_t place = input->number(2) % wire->size();
    const auto change = static_cast<std::uint8_t>(input->number(1));
    (*wire)[place] ^= change;
    tampered_ |= change != 0;
  }

  End ends_[2];
  Bytes wires_[2];  // [sender]
  std::vector<Bytes> sealed_[2];
  std::size_t step_;
  bool tampered_ = false;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
  Input input(bytes, size);
  const std::uint64_t choice = input.number(1);
  const std::size_t cut = input.number(1);
  const std::size_t step = cut == 0 ? SIZE_MAX : cut;
  const Role role = choice / 3 % 2 == 0 ? Role::kServer : Role::kClient;
  if (choice % 3 == 0) {
    raw_bytes(role, step, &input);
  } else if (choice % 3 == 1) {
    sealed_bytes(role, step, &input);
  } else {
    Wire wire(step);
    for (int i = 0; i < 64 && !input.empty(); ++i) wire.act(&input);
    wire.finish();
  }
  return 0;
}
