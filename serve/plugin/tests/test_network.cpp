// What a process keeps of the network for itself: few descriptors, and nothing in a forked child.
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "adaptive/service/directory.h"
#include "adaptive/service/network.h"
#include "adaptive/service/peers.h"
#include "platform/threads.h"
#include "tests/check.h"

using namespace dynamiccl;

namespace {

Network::Events no_events() {
  Network::Events events = {};
  events.established = [](void*, Connection*) {};
  events.message = [](void*, Connection*, const Message&) {};
  events.closed = [](void*, Connection*) {};
  return events;
}

/// A listener at any port of loopback, and where it is.
int listen_at(Network* network, Address* address) {
  CHECK(parse_address("127.0.0.1:1", std::strlen("127.0.0.1:1"), address));
  reinterpret_cast<sockaddr_in*>(&address->storage)->sin_port = 0;
  int descriptor = -1;
  CHECK(network->listen(address, false, &descriptor) == nullptr);
  return descriptor;
}

int connect_to(const Address& address) {
  const int made = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  connect(made, reinterpret_cast<const sockaddr*>(&address.storage), address.size);
  return made;
}

void child_keeps_no_address() {
  Network network;
  CHECK(network.start(no_events(), Secret{}));
  Address address;
  const int descriptor = listen_at(&network, &address);
  const pid_t child = fork();
  if (child == 0) _exit(fcntl(descriptor, F_GETFD) == -1 ? 0 : 1);
  int status = 1;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
  CHECK(fcntl(descriptor, F_GETFD) != -1);
}

/// With no descriptor left, whoever waits at the door is left there, at no cost; and the job's own
/// descriptors are its own.
void without_descriptors_it_neither_spins_nor_takes_the_last() {
  rlimit before = {};
  getrlimit(RLIMIT_NOFILE, &before);
  const int next = dup(0);
  close(next);
  rlimit few = before;
  few.rlim_cur = static_cast<rlim_t>(next) + 8;
  CHECK(setrlimit(RLIMIT_NOFILE, &few) == 0);
  Network network;
  CHECK(network.start(no_events(), Secret{}));
  CHECK(network.most_connections() == static_cast<int>(few.rlim_cur) / 2);
  Address address;
  listen_at(&network, &address);
  int clients[16], num_clients = 0;
  while (num_clients < 16 && (clients[num_clients] = connect_to(address)) >= 0) ++num_clients;
  CHECK(num_clients > 0 && num_clients < 16);
  int rounds = 0;
  const std::uint64_t until_ns = monotonic_ns() + 500'000'000;
  for (; monotonic_ns() < until_ns; ++rounds) network.run(100'000'000);
  CHECK(rounds < 20);
  for (int i = 0; i < num_clients; ++i) close(clients[i]);
  setrlimit(RLIMIT_NOFILE, &before);
}

/// Without rank 0 each rank asks its peers until one knows: what `knows` knows must come to all.
int reached_from(std::int32_t knows, std::int32_t num_ranks) {
  std::vector<bool> reached(static_cast<std::size_t>(num_ranks), false);
  reached[static_cast<std::size_t>(knows)] = true;
  int count = 1;
  for (bool any = true; any;) {
    any = false;
    for (std::int32_t rank = 1; rank < num_ranks; ++rank) {
      if (reached[static_cast<std::size_t>(rank)]) continue;
      std::int32_t peers[kMostPeers];
      const int num_peers = peers_of(rank, num_ranks, peers);
      const bool is_told = std::any_of(peers, peers + num_peers, [&](std::int32_t peer) {
        return peer != 0 && reached[static_cast<std::size_t>(peer)];
      });
      if (!is_told) continue;
      reached[static_cast<std::size_t>(rank)] = any = true;
      ++count;
    }
  }
  return count;
}

void lists_of_peers_are_short_and_reach_everybody() {
  std::int32_t peers[kMostPeers];
  CHECK(peers_of(0, 8192, peers) == 13);
  CHECK(peers_of(7, std::numeric_limits<std::int32_t>::max(), peers) == kMostPeers);
  for (std::int32_t num_ranks = 3; num_ranks <= 70; ++num_ranks) {
    for (std::int32_t knows = 1; knows < num_ranks; ++knows) {
      CHECK(reached_from(knows, num_ranks) == num_ranks - 1);
    }
  }
  CHECK(reached_from(1, 8193) == 8192 && reached_from(8192, 8193) == 8192);
}

/// What a directory hears and says while a world of so many ranks finds its leaders: each rank asks
/// once for each of its communicators. All of it, in bytes.
std::size_t bytes_of_a_directory(std::int32_t num_ranks, Directory* directory) {
  constexpr char kAddress[] = "[fdfa:ffff:ffff:ffff:ffff:ffff:ffff:ffff]:31999";
  constexpr std::uint64_t kWorld = 1, kFirstPair = 2;
  std::uint8_t bytes[kMessageHeaderBytes + kAddressTextBytes];
  std::size_t all = 0;
  const auto says = [&](MessageKind kind, std::uint64_t comm_id, bool is_answered) {
    Message message{}, answer{};
    message.kind = kind;
    message.comm_id = comm_id;
    if (kind == MessageKind::kRegister) {
      message.body = reinterpret_cast<const std::uint8_t*>(kAddress);
      message.body_bytes = sizeof kAddress - 1;
    }
    all += encode(message, bytes, sizeof bytes);
    CHECK(directory->receive(message, &answer) == is_answered);
    if (!is_answered) return;
    CHECK(answer.comm_id == comm_id && answer.body_bytes == sizeof kAddress - 1);
    CHECK(std::memcmp(answer.body, kAddress, answer.body_bytes) == 0);
    all += encode(answer, bytes, sizeof bytes);
  };
  says(MessageKind::kLookup, kWorld, false);  // before its leader came: asked again
  says(MessageKind::kRegister, kWorld, false);
  for (std::int32_t rank = 1; rank < num_ranks; ++rank) says(MessageKind::kLookup, kWorld, true);
  for (std::int32_t rank = 0; rank + 1 < num_ranks; rank += 2) {  // and one of each two ranks
    const std::uint64_t pair = kFirstPair + static_cast<std::uint64_t>(rank / 2);
    says(MessageKind::kRegister, pair, false);
    says(MessageKind::kLookup, pair, true);
  }
  return all;
}

void a_directory_says_so_much_for_each_rank_and_no_more() {
  const auto of = [](std::int32_t num_ranks) {
    Directory directory;
    const std::size_t bytes = bytes_of_a_directory(num_ranks, &directory);
    CHECK(directory.size() == 1 + num_ranks / 2);
    return bytes;
  };
  CHECK(of(16384) <= 2 * of(8192) && of(16384) <= std::size_t{16384} * 400);
}

}  // namespace

int main() {
  a_directory_says_so_much_for_each_rank_and_no_more();
  lists_of_peers_are_short_and_reach_everybody();
  child_keeps_no_address();
  without_descriptors_it_neither_spins_nor_takes_the_last();
  return g_failures;
}
