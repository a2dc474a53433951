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

}  // namespace

int main() {
  lists_of_peers_are_short_and_reach_everybody();
  child_keeps_no_address();
  without_descriptors_it_neither_spins_nor_takes_the_last();
  return g_failures;
}
