// The main loop: wait for sockets or time, then run what is due for each agreement.
#include "adaptive/service/service.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include "adaptive/agreement/guard.h"
#include "adaptive/service/brain_thread.h"
#include "adaptive/service/files.h"
#include "adaptive/service/metrics.h"
#include "adaptive/service/notes.h"
#include "adaptive/service/samples.h"
#include "adaptive/service/transport.h"
#include "platform/allocate.h"
#include "platform/threads.h"
#include "profiler/profiler.h"

namespace dynamiccl {
namespace {

constexpr std::uint64_t kSecond = 1'000'000'000;
/// How long an ended communicator is remembered: a peer may still ask for a decision.
constexpr std::uint64_t kLingerNs = 30 * kSecond;
constexpr std::uint64_t kIdleNs = 10 * kSecond;

class Service {
 public:
  const char* join(Agreement* agreement) noexcept;
  void leave(Agreement* agreement) noexcept;
  void wake() noexcept { network_.wake(); }
  void loop() noexcept;

 private:
  static void send(void* user, std::int32_t to_rank, const Message& message);
  static void established(void* user, Connection* connection);
  static void message(void* user, Connection* connection, const Message& message);
  static void closed(void* user, Connection* connection);
  static void prepare(void* user, Agreement* agreement);
  static void renew(void* user, Agreement* agreement);

  const char* start(const Settings& settings) noexcept;
  void take_arrivals() noexcept;
  void take_artifacts() noexcept;
  void bury() noexcept;
  void look_around(std::uint64_t now_ns) noexcept;
  void bind(Connection* connection, const Message& hello) noexcept;
  bool may_rest() noexcept;

  /// A newly read artifact; null: out of memory.
  struct Renewed {
    Renewed* next;
    Agreement* agreement;  // held
    Artifact* artifact;
  };

  Files files_;
  // The files' thread's.
  bool has_tried_ = false;
  const char* why_not_ = nullptr;

  Mutex mutex_;  // of these
  bool running_ = false;
  Agreement* arrivals_ = nullptr;
  Renewed* renewed_ = nullptr;

  // The thread's.
  Agreement* agreements_ = nullptr;
  Network network_;
  Transport transport_;
  Metrics metrics_;
  Notes notes_;
  std::uint64_t look_interval_ns_ = kSecond;
  std::uint64_t look_at_ns_ = 0;
};

/// Never destroyed: the thread may still run while the process exits.
alignas(Service) unsigned char g_memory[sizeof(Service)];
std::atomic<Service*> g_service{nullptr};
Mutex g_service_mutex;

Service* the_service() noexcept { return g_service.load(std::memory_order_acquire); }

Service* need_service() noexcept {
  const Lock lock(&g_service_mutex);
  if (the_service() == nullptr) {
    g_service.store(new (g_memory) Service, std::memory_order_release);
  }
  return the_service();
}

void* run_service(void*) {
  the_service()->loop();
  return nullptr;
}

const char* Service::start(const Settings& settings) noexcept {
  const Job job = find_job();
  Secret secret;
  if (const char* reason = find_secret(settings, job, &secret)) return reason;
  const Network::Events events = {established, message, closed, this};
  if (!network_.start(events, secret)) return "no more files can be opened";
  if (const char* reason = transport_.start(settings, job, &network_)) {
    network_.stop();
    return reason;
  }
  metrics_.start(settings, job);
  return nullptr;
}

const char* Service::join(Agreement* agreement) noexcept {
  return files_.prepare({prepare, renew, this}, agreement) ? nullptr : "no thread could be started";
}

/// Sockets and names belong to the process, and are tried once: with a silent name server no
/// communicator gets an agreement, but creating one takes no longer.
void Service::prepare(void* user, Agreement* agreement) {
  auto* service = static_cast<Service*>(user);
  agreement->load();
  if (!service->has_tried_) {
    service->has_tried_ = true;
    service->look_interval_ns_ = agreement->settings().look_interval_ns;
    service->why_not_ = service->start(agreement->settings());
  }
  const char* why_not = service->why_not_;
  if (why_not == nullptr) {
    const Lock lock(&service->mutex_);
    agreement->next = service->arrivals_;
    service->arrivals_ = agreement;
    if (!service->running_ && start_thread(run_service, nullptr, "dynamiccl")) {
      service->running_ = true;
    }
    if (service->running_) return service->wake();
    service->arrivals_ = agreement->next;
    why_not = "no thread could be started";
  }
  agreement->end(why_not);
  agreement->let_go();
}

void Service::renew(void* user, Agreement* agreement) {
  auto* service = static_cast<Service*>(user);
  auto* fresh = allocate<Artifact>();
  if (fresh != nullptr) fresh->load(agreement->settings(), agreement->place());
  auto* renewed = static_cast<Renewed*>(std::malloc(sizeof(Renewed)));
  if (renewed == nullptr) {
    deallocate(fresh);
    return agreement->let_go();  // no new artifact for this one any more
  }
  const Lock lock(&service->mutex_);
  *renewed = {service->renewed_, agreement, fresh};
  service->renewed_ = renewed;
  service->wake();
}

void Service::leave(Agreement* agreement) noexcept {
  agreement->closing.store(true, std::memory_order_release);
  wake();
}

// ---- what follows runs on the thread ----

void Service::send(void* user, std::int32_t to_rank, const Message& message) {
  auto* agreement = static_cast<Agreement*>(user);
  if (to_rank == agreement->place().rank) return the_service()->notes_.add(agreement, message);
  Connection* connection = agreement->by_rank[to_rank];
  if (connection == nullptr) {
    the_service()->transport_.connect(agreement, to_rank, monotonic_ns());
  } else if (connection->session.established()) {
    the_service()->network_.send(connection, message);
  }
}

void Service::established(void* user, Connection* connection) {
  auto* service = static_cast<Service*>(user);
  if (connection->is_client) service->transport_.introduce(connection);
  if (connection->owner != nullptr) connection->owner->connect_pause_ns = 0;
}

/// The first message of an accepted connection tells the two ranks that it is for.
void Service::bind(Connection* connection, const Message& hello) noexcept {
  if (hello.kind != MessageKind::kHello) return network_.close(connection);
  for (Agreement* each = agreements_; each != nullptr; each = each->next) {
    const Member::Place& place = each->place();
    if (!each->begun || each->by_rank == nullptr) continue;
    if (place.comm_id != connection->session.comm_id() || place.comm_id != hello.comm_id) continue;
    if (static_cast<std::uint64_t>(place.rank) != hello.index) continue;
    if (hello.rank < 0 || hello.rank >= place.num_ranks || hello.rank == place.rank) break;
    connection->owner = each;
    connection->peer_rank = hello.rank;
    each->by_rank[hello.rank] = connection;
    return;
  }
  network_.close(connection);  // it will come again, should it be early
}

void Service::message(void* user, Connection* connection, const Message& message) {
  auto* service = static_cast<Service*>(user);
  if (connection->is_directory) {
    return service->transport_.directory_message(connection, message, service->agreements_);
  }
  if (connection->owner == nullptr) {
    service->bind(connection, message);
    if (connection->owner == nullptr) return;
  }
  Agreement* agreement = connection->owner;
  if (message.comm_id != agreement->place().comm_id) return service->network_.close(connection);
  if (message.kind == MessageKind::kHello) {
    // Lines, a zero, and the address.
    const auto* text = reinterpret_cast<const char*>(message.body);
    const char* end = text + message.body_bytes;
    const char* zero = std::find(text, end, '\0');
    const auto address_bytes = static_cast<std::size_t>(end - zero);
    if (zero != end && address_bytes <= kAddressTextBytes) {
      char* to = agreement->addresses[connection->peer_rank];
      std::memcpy(to, zero + 1, address_bytes - 1);
      to[address_bytes - 1] = '\0';
    }
    Message hello = message;
    hello.body_bytes = static_cast<std::uint32_t>(zero - text);
    const bool were_all = agreement->leader() != nullptr &&
                          agreement->leader()->num_here() == agreement->place().num_ranks;
    agreement->receive(connection->peer_rank, hello, monotonic_ns());
    if (agreement->leader() != nullptr && !were_all)
      service->transport_.tell_peers(*agreement, {send, agreement});
  } else if (message.kind == MessageKind::kPeers) {
    constexpr std::size_t kEntry = 4 + kAddressTextBytes;
    for (std::size_t at = 0; at + kEntry <= message.body_bytes; at += kEntry) {
      std::int32_t rank;
      std::memcpy(&rank, message.body + at, sizeof rank);
      if (rank <= 0 || rank >= agreement->place().num_ranks) continue;
      std::memcpy(agreement->addresses[rank], message.body + at + 4, kAddressTextBytes);
      agreement->addresses[rank][kAddressTextBytes - 1] = '\0';
    }
  } else {
    agreement->receive(connection->peer_rank, message, monotonic_ns());
  }
}

void Service::closed(void* user, Connection* connection) {
  auto* service = static_cast<Service*>(user);
  if (connection->is_directory) return service->transport_.directory_closed(connection);
  Agreement* agreement = connection->owner;
  if (agreement == nullptr || agreement->by_rank == nullptr) return;
  Connection*& known = agreement->by_rank[connection->peer_rank];
  if (known == connection) known = nullptr;
}

void Service::take_arrivals() noexcept {
  Agreement* arrivals = nullptr;
  {
    const Lock lock(&mutex_);
    arrivals = arrivals_;
    arrivals_ = nullptr;
  }
  while (arrivals != nullptr) {
    Agreement* agreement = arrivals;
    arrivals = agreement->next;
    agreement->next = agreements_;
    agreements_ = agreement;
    agreement->begin({send, agreement}, monotonic_ns());
    if (const char* reason = transport_.open(agreement)) agreement->end(reason);
    watch_samples(agreement);
  }
}

/// Removes communicators that ended long enough ago.
void Service::bury() noexcept {
  const std::uint64_t now_ns = monotonic_ns();
  Agreement** link = &agreements_;
  while (*link != nullptr) {
    Agreement* agreement = *link;
    const bool is_closing = agreement->closing.load(std::memory_order_acquire);
    if (is_closing && agreement->linger_until_ns == 0) {
      agreement->linger_until_ns = now_ns + (agreement->is_settled() ? kLingerNs / 10 : kLingerNs);
      if (agreement->member() != nullptr) agreement->member()->leave();
      unwatch_samples(agreement);
    }
    if (!is_closing || now_ns < agreement->linger_until_ns) {
      link = &agreement->next;
      continue;
    }
    *link = agreement->next;
    transport_.close(agreement);
    const auto count = agreement->by_rank != nullptr ? agreement->place().num_ranks : 0;
    for (std::int32_t rank = 0; rank < count; ++rank) {
      if (agreement->by_rank[rank] != nullptr) network_.close(agreement->by_rank[rank]);
    }
    network_.disown(agreement);
    agreement->let_go();
  }
}

void Service::take_artifacts() noexcept {
  Renewed* renewed = nullptr;
  {
    const Lock lock(&mutex_);
    renewed = renewed_;
    renewed_ = nullptr;
  }
  while (renewed != nullptr) {
    Renewed* done = renewed;
    renewed = done->next;
    done->agreement->take_artifact(done->artifact);
    done->agreement->let_go();
    std::free(done);
  }
}

/// For leaders: changes that the files' thread saw.
void Service::look_around(std::uint64_t now_ns) noexcept {
  for (Agreement* each = agreements_; each != nullptr; each = each->next) {
    if (each->linger_until_ns != 0 || each->leader() == nullptr) continue;
    each->see_kill_file(files_.sees_kill_file());
    if (each->wants_artifact(files_.index_stamp()) && !files_.renew(each)) {
      each->take_artifact(nullptr);
    }
    ask_brain(each, now_ns);
  }
  metrics_.write(agreements_, now_ns, &files_);
}

/// Without communicators the thread ends; the next one starts it again. Not where it runs the
/// directory, which other processes may need at any time.
bool Service::may_rest() noexcept {
  if (agreements_ != nullptr || transport_.runs_directory()) return false;
  const Lock lock(&mutex_);
  if (arrivals_ != nullptr || renewed_ != nullptr) return false;
  running_ = false;
  return true;
}

void Service::loop() noexcept {
  for (;;) {
    take_arrivals();
    take_artifacts();
    files_.keep_looking(agreements_ != nullptr);
    std::uint64_t now_ns = monotonic_ns();
    std::uint64_t due_ns = now_ns + kIdleNs;
    const auto at = [&due_ns](std::uint64_t when) {
      if (when != 0) due_ns = std::min(due_ns, when);
    };
    take_proposals(now_ns);
    for (Agreement* each = agreements_; each != nullptr; each = each->next) {
      if (each->begun) each->tick(now_ns);
    }
    notes_.deliver(now_ns);
    at(transport_.tick(agreements_, now_ns));
    if (now_ns >= look_at_ns_) {
      look_at_ns_ = now_ns + look_interval_ns_;
      look_around(now_ns);
      notes_.deliver(now_ns);
    }
    if (send_samples(agreements_, {send, nullptr}, now_ns)) notes_.deliver(now_ns);
    bury();
    for (Agreement* each = agreements_; each != nullptr; each = each->next) {
      at(each->due_ns(now_ns));
      if (each->clock()->is_waiting()) at(now_ns + kSecond / 1000);
      at(each->linger_until_ns);
    }
    if (agreements_ != nullptr) at(look_at_ns_);
    if (may_rest()) return;
    now_ns = monotonic_ns();
    network_.run(due_ns > now_ns ? due_ns - now_ns : 0);
    notes_.deliver(monotonic_ns());
  }
}

}  // namespace

bool join_service(Agreement* agreement, const char** reason) noexcept {
  *reason = need_service()->join(agreement);
  return *reason == nullptr;
}

void leave_service(Agreement* agreement) noexcept { the_service()->leave(agreement); }

void wake_service() noexcept {
  if (the_service() != nullptr) the_service()->wake();
}

}  // namespace dynamiccl
