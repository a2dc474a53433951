// Failed connections are retried with growing pauses: ranks start in any order.
#include "adaptive/service/transport.h"

#include <errno.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstring>

#include "adaptive/service/peers.h"
#include "trusted/file.h"

namespace dynamiccl {
namespace {

constexpr std::uint64_t kMillisecond = 1'000'000;
constexpr std::uint64_t kFirstPauseNs = 2 * kMillisecond;
constexpr std::uint64_t kLongestPauseNs = 500 * kMillisecond;
constexpr std::uint64_t kAskPauseNs = 100 * kMillisecond;
constexpr std::uint64_t kDirectoryIdleNs = 2000 * kMillisecond;

/// A directory that only this user can enter.
const char* make_own_directory(const char* path) noexcept {
  if (mkdir(path, 0700) != 0 && errno != EEXIST) return "DYNAMICCL_RUN_DIR cannot be made";
  File directory;
  return open_trusted_directory(path, &directory) == nullptr
             ? nullptr
             : "DYNAMICCL_RUN_DIR belongs to somebody else, or others may write to it";
}

}  // namespace

const char* find_secret(const Settings& settings, const Job& job, Secret* secret) noexcept {
  secret->job = job.id;
  secret->restart = job.restart;
  if (settings.key_file != nullptr) {
    return load_key(settings.key_file, secret->key) == nullptr
               ? nullptr
               : "DYNAMICCL_KEY_FILE is not a key that is this user's alone (mode 0600)";
  }
  if (settings.coordinator != nullptr) return "DYNAMICCL_KEY_FILE is not set";
  // Local sockets in a directory of this user's, with checked peers, need no secret.
  Sha256 sha;
  constexpr char kLocal[] = "dynamiccl-local";
  sha.update(kLocal, sizeof kLocal);
  sha.finish(secret->key);
  return nullptr;
}

const char* Transport::start(const Settings& settings, const Job& job, Network* network) noexcept {
  has_coordinator_ = settings.coordinator != nullptr;
  network_ = network;
  const char* reason = has_coordinator_ ? start_tcp(settings, job) : start_local(settings, job);
  if (reason != nullptr) network_ = nullptr;
  return reason;
}

const char* Transport::start_local(const Settings& settings, const Job& job) noexcept {
  if (const char* reason = make_own_directory(settings.run_dir)) return reason;
  const int length = std::snprintf(run_dir_, sizeof run_dir_, "%s/%016" PRIx64 "-%u",
                                   settings.run_dir, job.id, job.restart);
  if (length < 0 || static_cast<std::size_t>(length) >= sizeof run_dir_) {
    return "DYNAMICCL_RUN_DIR is too long";
  }
  if (const char* reason = make_own_directory(run_dir_)) return reason;
  const char* problem = open_trusted_directory(run_dir_, &run_directory_);
  return problem == nullptr ? nullptr : "DYNAMICCL_RUN_DIR cannot be opened";
}

const char* Transport::start_tcp(const Settings& settings, const Job& job) noexcept {
  if (job.world_rank < 0) return "the launcher tells no world rank";
  if (!resolve_address(settings.coordinator, &coordinator_)) {
    return "DYNAMICCL_COORDINATOR is not host:port or [v6]:port of a host that is known here";
  }
  if (!interface_address(settings.interfaces, &own_)) {
    return "no interface has an address; see DYNAMICCL_SOCKET_IFNAME";
  }
  int descriptor = -1;
  if (job.world_rank == 0) {
    // On this port at any address: the address that others use is not known here.
    Address any = coordinator_;
    const std::size_t from = any.storage.ss_family == AF_INET ? 4 : 8;
    auto* bytes = reinterpret_cast<std::uint8_t*>(&any.storage);
    std::memset(bytes + from, 0, any.storage.ss_family == AF_INET ? 4 : 16);
    if (network_->listen(&any, true, &descriptor) != nullptr) {
      return "the port of DYNAMICCL_COORDINATOR is taken on world rank 0's node";
    }
    runs_directory_ = true;
  }
  return listen_for_ranks(job) && write_address(own_, own_text_) ? nullptr : "no port to listen on";
}

/// On any port but the directory's, which the system may give out here before world rank 0 has it.
bool Transport::listen_for_ranks(const Job& job) noexcept {
  const Address any_port = own_;
  int descriptor = -1;
  if (network_->listen(&own_, false, &descriptor) != nullptr) return false;
  if (job.world_rank == 0 || port_of(own_) != port_of(coordinator_)) return true;
  const int directorys = descriptor;
  own_ = any_port;
  const bool listens = network_->listen(&own_, false, &descriptor) == nullptr;
  network_->stop_listening(directorys);
  return listens;
}

bool Transport::path_of(const Agreement& agreement, std::int32_t rank,
                        Address* address) const noexcept {
  // A socket path has room for 107 bytes, and directories can have long names.
  char path[100];
  std::snprintf(path, sizeof path, "/proc/self/fd/%d/%016" PRIx64 "-%d",
                run_directory_.descriptor(), agreement.place().comm_id, rank);
  return local_address(path, address);
}

const char* Transport::open(Agreement* agreement) noexcept {
  if (agreement->is_leader() && agreement->place().num_ranks > network_->most_connections()) {
    return "rank 0 may not open a connection to each rank; raise its ulimit -n to more than twice "
           "the ranks";
  }
  if (has_coordinator_) return nullptr;
  Address address;
  if (!path_of(*agreement, agreement->place().rank, &address))
    return "its socket's path is too long";
  const auto* path = reinterpret_cast<const char*>(&address.storage) + sizeof(sa_family_t);
  unlink(path);  // of a process that was killed: nobody else has this rank
  return network_->listen(&address, false, &agreement->listener);
}

void Transport::close(Agreement* agreement) noexcept {
  if (agreement->listener < 0) return;
  network_->stop_listening(agreement->listener);
  agreement->listener = -1;
  Address address;
  if (path_of(*agreement, agreement->place().rank, &address)) {
    unlink(reinterpret_cast<const char*>(&address.storage) + sizeof(sa_family_t));
  }
  rmdir(run_dir_);  // goes when the last of the job's sockets is gone
}

Connection* Transport::connect(Agreement* agreement, std::int32_t rank,
                               std::uint64_t now_ns) noexcept {
  Address address;
  bool known = false;
  if (has_coordinator_) {
    const char* text = agreement->addresses[rank];
    known = text[0] != '\0' && parse_address(text, std::strlen(text), &address);
  } else {
    known = path_of(*agreement, rank, &address);
  }
  if (!known) return nullptr;
  Connection* connection = network_->connect(address, agreement->place().comm_id, now_ns);
  if (connection == nullptr) return nullptr;
  connection->owner = agreement;
  connection->peer_rank = rank;
  agreement->by_rank[rank] = connection;
  return connection;
}

void Transport::introduce(Connection* connection) noexcept {
  Message hello{};
  hello.kind = MessageKind::kHello;
  if (connection->is_directory) return;
  const Agreement& agreement = *connection->owner;
  hello.comm_id = agreement.place().comm_id;
  hello.rank = agreement.place().rank;
  hello.index = static_cast<std::uint64_t>(connection->peer_rank);
  // The lines, a zero, and where this rank listens.
  std::uint8_t body[kIdentityBytes + kAddressTextBytes];
  const std::size_t lines = std::strlen(agreement.identity()), address = std::strlen(own_text_);
  std::memcpy(body, agreement.identity(), lines + 1);
  std::memcpy(body + lines + 1, own_text_, address);
  hello.body = body;
  hello.body_bytes = static_cast<std::uint32_t>(lines + 1 + address);
  network_->send(connection, hello);
}

void Transport::tell_peers(const Agreement& agreement, const Outlet& outlet) const noexcept {
  const Member::Place& place = agreement.place();
  if (!has_coordinator_ || agreement.leader()->num_here() < place.num_ranks) return;
  constexpr std::size_t kEntry = 4 + kAddressTextBytes;
  std::uint8_t body[kMostPeers * kEntry];
  for (std::int32_t to = 1; to < place.num_ranks; ++to) {
    Message message{};
    message.kind = MessageKind::kPeers;
    message.comm_id = place.comm_id;
    message.rank = 0;
    message.body = body;
    std::int32_t peers[kMostPeers];
    const int num_peers = peers_of(to, place.num_ranks, peers);
    for (int i = 0; i < num_peers; ++i) {
      const std::int32_t rank = peers[i];
      std::memcpy(body + message.body_bytes, &rank, sizeof rank);
      std::memcpy(body + message.body_bytes + 4, agreement.addresses[rank], kAddressTextBytes);
      message.body_bytes += kEntry;
    }
    outlet.send(outlet.user, to, message);
  }
}

std::uint64_t Transport::tick(Agreement* agreements, std::uint64_t now_ns) noexcept {
  std::uint64_t due = 0;
  const auto at = [&due](std::uint64_t when) { due = due == 0 ? when : std::min(due, when); };
  const bool asks = has_coordinator_ && now_ns >= ask_at_ns_;
  bool wants_directory = false;
  for (Agreement* each = agreements; each != nullptr; each = each->next) {
    if (!each->begun || each->has_ended() || each->by_rank == nullptr) continue;
    if (each->is_leader()) {
      wants_directory |= has_coordinator_ && !each->has_address_of_leader;
      continue;
    }
    if (each->by_rank[0] != nullptr) continue;
    if (has_coordinator_ && !each->has_address_of_leader) {
      wants_directory = true;
      continue;
    }
    if (now_ns >= each->connect_at_ns) {
      // Both end when the connection is established, or else is closed.
      each->connect_pause_ns =
          std::clamp(2 * each->connect_pause_ns, kFirstPauseNs, kLongestPauseNs);
      each->connect_at_ns = now_ns + each->connect_pause_ns;
      connect(each, 0, now_ns);
    }
    if (each->by_rank[0] == nullptr) at(each->connect_at_ns);
  }
  if (!wants_directory) {
    // The registration has been sent by then.
    if (to_directory_ != nullptr && now_ns >= ask_at_ns_ + kDirectoryIdleNs) {
      network_->close(to_directory_);
      to_directory_ = nullptr;
    }
    if (to_directory_ != nullptr) at(ask_at_ns_ + kDirectoryIdleNs);
    return due;
  }
  if (to_directory_ == nullptr && now_ns >= directory_at_ns_) {
    directory_at_ns_ = now_ns + kAskPauseNs;
    to_directory_ = network_->connect(coordinator_, 0, now_ns);
    if (to_directory_ != nullptr) to_directory_->is_directory = true;
  }
  at(to_directory_ == nullptr ? directory_at_ns_ : std::max(ask_at_ns_, now_ns + kMillisecond));
  if (!asks || to_directory_ == nullptr || !to_directory_->session.established()) return due;
  ask_at_ns_ = now_ns + kAskPauseNs;
  for (Agreement* each = agreements; each != nullptr; each = each->next) {
    if (!each->begun || each->has_ended() || each->has_address_of_leader) continue;
    Message message{};
    message.comm_id = each->place().comm_id;
    message.kind = each->is_leader() ? MessageKind::kRegister : MessageKind::kLookup;
    if (each->is_leader()) {
      message.body = reinterpret_cast<const std::uint8_t*>(own_text_);
      message.body_bytes = static_cast<std::uint32_t>(std::strlen(own_text_));
    }
    const bool sent = network_->send(to_directory_, message);
    if (sent && each->is_leader()) each->has_address_of_leader = true;
  }
  return due;
}

void Transport::directory_message(Connection* connection, const Message& message,
                                  Agreement* agreements) noexcept {
  if (!connection->is_client) {
    Message answer;
    if (runs_directory_ && directory_.receive(message, &answer)) network_->send(connection, answer);
    return;
  }
  if (message.kind != MessageKind::kFound || message.body_bytes >= kAddressTextBytes) return;
  for (Agreement* each = agreements; each != nullptr; each = each->next) {
    if (each->place().comm_id != message.comm_id || each->is_leader() || !each->begun) continue;
    if (each->addresses == nullptr) continue;
    std::memcpy(each->addresses[0], message.body, message.body_bytes);
    each->addresses[0][message.body_bytes] = '\0';
    each->has_address_of_leader = true;
    each->connect_at_ns = 0;
  }
}

void Transport::directory_closed(Connection* connection) noexcept {
  if (connection == to_directory_) to_directory_ = nullptr;
}

}  // namespace dynamiccl
