// Ranks on world rank 0's node that come before it leave the directory's port free.
//
// In a network of its own with two ports to give out, the second of them the directory's.
#include <arpa/inet.h>
#include <net/if.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "adaptive/service/transport.h"
#include "tests/check.h"

using namespace dynamiccl;

namespace {

constexpr char kDirectory[] = "127.0.0.1:40001";

bool enter_network_of_two_ports() {
  if (unshare(CLONE_NEWNET) != 0) return false;
  const int descriptor = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  ifreq request = {};
  std::strcpy(request.ifr_name, "lo");
  request.ifr_flags = IFF_UP | IFF_LOOPBACK | IFF_RUNNING;
  const bool is_up = ioctl(descriptor, SIOCSIFFLAGS, &request) == 0;
  close(descriptor);
  std::FILE* range = std::fopen("/proc/sys/net/ipv4/ip_local_port_range", "w");
  if (range == nullptr) return false;
  const bool is_written = std::fputs("40000 40001", range) >= 0;
  return std::fclose(range) == 0 && is_written && is_up;
}

/// What a process of one job listens and connects with.
struct Process {
  explicit Process(std::int32_t world_rank) : job{1, 0, world_rank} {
    CHECK(settings.read());
    Network::Events events = {};
    events.established = [](void*, Connection*) {};
    events.message = [](void*, Connection*, const Message&) {};
    events.closed = [](void*, Connection*) {};
    CHECK(network.start(events, Secret{}));
  }

  Settings settings;
  Job job;
  Network network;
  Transport transport;
};

/// Whether world rank 0 could listen there, just now.
bool is_free(const char* text) {
  Process directory(0);
  Address address;
  CHECK(parse_address(text, std::strlen(text), &address));
  int descriptor;
  return directory.network.listen(&address, true, &descriptor) == nullptr;
}

void ranks_listen_elsewhere() {
  Process rank(1);
  CHECK(rank.transport.start(rank.settings, rank.job, &rank.network) == nullptr);
  CHECK(is_free(kDirectory));
  CHECK(!is_free("127.0.0.1:40000"));
}

void nobody_connects_to_itself() {
  Process rank(1);
  CHECK(rank.transport.start(rank.settings, rank.job, &rank.network) == nullptr);
  Address directory;
  CHECK(parse_address(kDirectory, std::strlen(kDirectory), &directory));
  for (int i = 0; i < 10; ++i) {  // the one port left is the one that is asked for
    CHECK(rank.network.connect(directory, 0, 0) == nullptr);
    CHECK(is_free(kDirectory));
  }
}

}  // namespace

int main() {
  if (!enter_network_of_two_ports()) {
    std::puts("skipped: no network of its own can be had here");
    return 77;
  }
  setenv("DYNAMICCL_COORDINATOR", kDirectory, 1);
  setenv("DYNAMICCL_SOCKET_IFNAME", "lo", 1);
  ranks_listen_elsewhere();
  nobody_connects_to_itself();
  return g_failures;
}
