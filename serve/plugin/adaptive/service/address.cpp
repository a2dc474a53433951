// Interfaces are chosen as NCCL chooses them (`src/misc/socket.cc`, findInterfaces, v2.30.7-1).
#include "adaptive/service/address.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/un.h>

#include <cstdint>
#include <cstdio>
#include <cstring>

#include "identity/environment.h"

namespace dynamiccl {
namespace {

constexpr std::size_t kHostBytes = 256;

/// Splits `host:port` at its last colon and takes the brackets off.
bool split(const char* text, std::size_t length, char (&host)[kHostBytes],
           char (&port)[8]) noexcept {
  std::size_t colon = length;
  while (colon > 0 && text[colon - 1] != ':') --colon;
  if (colon < 2 || length - colon >= sizeof port || length == colon) return false;
  std::memcpy(port, text + colon, length - colon);
  port[length - colon] = '\0';
  std::size_t from = 0, to = colon - 1;
  if (text[0] == '[') {
    if (to < 3 || text[to - 1] != ']') return false;
    from = 1;
    --to;
  }
  if (to - from >= kHostBytes || to == from) return false;
  std::memcpy(host, text + from, to - from);
  host[to - from] = '\0';
  std::uint64_t number;
  return parse_number(port, &number) && number > 0 && number < 65536;
}

bool look_up(const char* text, std::size_t length, int flags, Address* address) noexcept {
  char host[kHostBytes], port[8];
  if (!split(text, length, host, port)) return false;
  addrinfo hints = {};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  addrinfo* found = nullptr;
  if (getaddrinfo(host, port, &hints, &found) != 0 || found == nullptr) return false;
  std::memset(address, 0, sizeof *address);
  std::memcpy(&address->storage, found->ai_addr, found->ai_addrlen);
  address->size = found->ai_addrlen;
  freeaddrinfo(found);
  return true;
}

bool name_matches(const char* name, const char* pattern, std::size_t length, bool exactly) {
  return std::strncmp(name, pattern, length) == 0 && (!exactly || name[length] == '\0');
}

bool is_wanted(const ifaddrs& interface, const char* wanted) noexcept {
  if (wanted == nullptr) {
    if ((interface.ifa_flags & IFF_LOOPBACK) != 0) return false;
    return std::strncmp(interface.ifa_name, "docker", 6) != 0 &&
           std::strncmp(interface.ifa_name, "virbr", 5) != 0;
  }
  const bool none_of = wanted[0] == '^';
  if (none_of) ++wanted;
  const bool exactly = wanted[0] == '=';
  if (exactly) ++wanted;
  bool listed = false;
  while (*wanted != '\0') {
    const std::size_t length = std::strcspn(wanted, ",");
    if (length > 0) listed |= name_matches(interface.ifa_name, wanted, length, exactly);
    wanted += length;
    if (*wanted == ',') ++wanted;
  }
  return listed != none_of;
}

}  // namespace

bool resolve_address(const char* text, Address* address) noexcept {
  return look_up(text, std::strlen(text), AI_NUMERICSERV, address);
}

bool parse_address(const char* text, std::size_t length, Address* address) noexcept {
  return look_up(text, length, AI_NUMERICSERV | AI_NUMERICHOST, address);
}

bool write_address(const Address& address, char (&text)[kAddressTextBytes]) noexcept {
  char host[INET6_ADDRSTRLEN];
  if (address.storage.ss_family == AF_INET) {
    const auto* v4 = reinterpret_cast<const sockaddr_in*>(&address.storage);
    if (inet_ntop(AF_INET, &v4->sin_addr, host, sizeof host) == nullptr) return false;
    std::snprintf(text, sizeof text, "%s:%u", host, ntohs(v4->sin_port));
    return true;
  }
  if (address.storage.ss_family != AF_INET6) return false;
  const auto* v6 = reinterpret_cast<const sockaddr_in6*>(&address.storage);
  if (inet_ntop(AF_INET6, &v6->sin6_addr, host, sizeof host) == nullptr) return false;
  std::snprintf(text, sizeof text, "[%s]:%u", host, ntohs(v6->sin6_port));
  return true;
}

int port_of(const Address& address) noexcept {
  const auto* v4 = reinterpret_cast<const sockaddr_in*>(&address.storage);
  const auto* v6 = reinterpret_cast<const sockaddr_in6*>(&address.storage);
  return ntohs(address.storage.ss_family == AF_INET ? v4->sin_port : v6->sin6_port);
}

bool local_address(const char* path, Address* address) noexcept {
  std::memset(address, 0, sizeof *address);
  auto* local = reinterpret_cast<sockaddr_un*>(&address->storage);
  const std::size_t length = std::strlen(path);
  if (length >= sizeof local->sun_path) return false;
  local->sun_family = AF_UNIX;
  std::memcpy(local->sun_path, path, length + 1);
  address->size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + length + 1);
  return true;
}

bool interface_address(const char* wanted, Address* address) noexcept {
  ifaddrs* interfaces = nullptr;
  if (getifaddrs(&interfaces) != 0) return false;
  std::memset(address, 0, sizeof *address);
  for (const ifaddrs* each = interfaces; each != nullptr; each = each->ifa_next) {
    if (each->ifa_addr == nullptr || (each->ifa_flags & IFF_UP) == 0) continue;
    const int family = each->ifa_addr->sa_family;
    if ((family != AF_INET && family != AF_INET6) || !is_wanted(*each, wanted)) continue;
    if (family == AF_INET6) {
      const auto* v6 = reinterpret_cast<const sockaddr_in6*>(each->ifa_addr);
      // Such an address means nothing on another node.
      if (IN6_IS_ADDR_LINKLOCAL(&v6->sin6_addr)) continue;
    }
    const socklen_t size = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    // The first IPv4 address is taken, or else the first IPv6 one.
    if (address->size != 0 && !(family == AF_INET && address->storage.ss_family == AF_INET6)) {
      continue;
    }
    std::memcpy(&address->storage, each->ifa_addr, size);
    address->size = size;
  }
  freeifaddrs(interfaces);
  return address->size != 0;
}

}  // namespace dynamiccl
