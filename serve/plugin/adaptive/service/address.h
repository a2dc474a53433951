// Where a process listens: an IP address and port, or a socket in the file system.
#pragma once

#include <sys/socket.h>

#include <cstddef>

namespace dynamiccl {

inline constexpr std::size_t kAddressTextBytes = 72;

struct Address {
  sockaddr_storage storage;
  socklen_t size;  // 0: none
};

/// `host:port` or `[v6]:port`. Looks a host name up, which can take seconds. False when there is no
/// such address.
bool resolve_address(const char* text, Address* address) noexcept;

/// The same for numbers only, without any look-up.
bool parse_address(const char* text, std::size_t length, Address* address) noexcept;

/// Numbers, as parse_address reads them.
bool write_address(const Address& address, char (&text)[kAddressTextBytes]) noexcept;

/// Of an IP address.
int port_of(const Address& address) noexcept;

/// A socket at `path`; false when the path is too long for one.
bool local_address(const char* path, Address* address) noexcept;

/// An address of an interface that `wanted` (NCCL's syntax: `eth,ib` prefixes, `=eth0` exactly,
/// `^lo` anything but; null: any that is up, and no loopback or bridge of containers) names, to
/// listen on any port of. False when there is none.
bool interface_address(const char* wanted, Address* address) noexcept;

}  // namespace dynamiccl
