// The arbiter of a job on several hosts: two processes outside of the job's tree.
//
//   dynamiccl-arbiter JOB KEY_FILE [PORT]
//
// JOB is a hexadecimal number, KEY_FILE 16 bytes. It prints its port on one line and goes into the
// background: a session of its own, with descriptors 0, 1 and 2 closed, so that nobody waits for it
// who reads a launcher's output to its end or waits for all its children. It ends with the process
// that started it.
//
// The *keeper* holds the listening socket and the log (a memfd: no disk that could be full, nothing
// to remove) and starts the *worker* again when that is killed. The worker answers. It lives on
// when the keeper is killed.
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <unordered_map>
#include <vector>

#include "agree/rounds.h"
#include "agree/seal.h"

namespace dynamiccl {
namespace {

constexpr int kUsage = 2, kMachine = 4;
constexpr std::uint64_t kLookMs = 1'000;

std::uint64_t now_ms() {
  timespec now = {};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1'000 +
         static_cast<std::uint64_t>(now.tv_nsec) / 1'000'000;
}

/// A process by number and start: a number alone may be somebody else's one day.
struct Process {
  pid_t pid;
  std::string start;

  /// Field 22 of /proc/PID/stat (proc(5)); empty when it has ended.
  static std::string start_of(pid_t pid) {
    std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
    std::string text((std::istreambuf_iterator<char>(file)), {});
    // The name stands in brackets and may hold spaces and brackets itself.
    std::size_t at = text.rfind(')');
    if (at == std::string::npos || text.compare(at, 3, ") Z") == 0) return "";
    for (int field = 2; field < 22 && at != std::string::npos; ++field) at = text.find(' ', at + 1);
    return at == std::string::npos ? "" : text.substr(at + 1, text.find(' ', at + 1) - at - 1);
  }
  explicit Process(pid_t number) : pid(number), start(start_of(number)) {}
  bool lives() const { return !start.empty() && start_of(pid) == start; }
};

class Worker final : private Outlet {
 public:
  Worker(std::uint64_t job, const Key& key, int listener, int log)
      : key_(key), listener_(listener), log_(log), rounds_(job, limits_of_job()) {}

  /// Answers until the launcher's process ends.
  void run(const Process& launcher);

 private:
  struct Peer {
    int descriptor = -1;
    Vote vote;  // what it sent last, or a part of it
    std::size_t size = 0;
    bool has_voted = false;
  };

  bool log(const Logged& table) override {
    return write(log_, &table, sizeof table) == static_cast<ssize_t>(sizeof table);
  }
  void send(Connection to, const Reply& reply) override;
  std::uint64_t draw() override {
    std::uint64_t number = 0;
    while (number == 0) {
      if (getrandom(&number, sizeof number, 0) != sizeof number) number = 0;
    }
    return number;
  }
  void decided(const RoundKey&, std::uint32_t, const Reply&) override {}

  void restore();
  void accept_all();
  void answer_without_descriptors();
  void read_from(Connection connection);
  void end(Connection connection);

  Key key_;
  int listener_;
  int log_;
  Rounds rounds_;
  int epoll_ = -1;
  int reserve_ = -1;
  Connection last_ = 0;
  std::unordered_map<Connection, Peer> peers_;
};

void Worker::restore() {
  Logged table;
  for (off_t at = 0; pread(log_, &table, sizeof table, at) == static_cast<ssize_t>(sizeof table);
       at += static_cast<off_t>(sizeof table)) {
    rounds_.restore(table);
  }
}

void Worker::send(Connection to, const Reply& reply) {
  const auto found = peers_.find(to);
  if (found == peers_.end()) return;
  Reply sealed = reply;
  sealed.mac = mac_of(key_, sealed, found->second.vote);
  // It fits into the buffer of a new connection; one that does not take it asks again.
  (void)::send(found->second.descriptor, &sealed, sizeof sealed, MSG_NOSIGNAL | MSG_DONTWAIT);
}

void Worker::end(Connection connection) {
  const auto found = peers_.find(connection);
  close(found->second.descriptor);
  peers_.erase(found);
  rounds_.gone(connection, this);
}

void Worker::accept_all() {
  const int one = 1;
  for (;;) {
    const int descriptor = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (descriptor < 0) {
      if (errno == EMFILE || errno == ENFILE) answer_without_descriptors();
      return;
    }
    setsockopt(descriptor, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    setsockopt(descriptor, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof one);
    epoll_event event = {};
    event.events = EPOLLIN;
    event.data.u64 = ++last_;
    peers_[last_].descriptor = descriptor;
    if (epoll_ctl(epoll_, EPOLL_CTL_ADD, descriptor, &event) != 0) end(last_);
  }
}

/// The one descriptor that is kept for this: a vote becomes a problem of its rank, so that its
/// round abstains at once; a recall is answered if its round is decided, and else asks again.
void Worker::answer_without_descriptors() {
  close(reserve_);
  const int descriptor = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
  if (descriptor >= 0) {
    const timeval patience = {0, 100'000};
    setsockopt(descriptor, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    Peer& peer = peers_[++last_];
    peer.descriptor = descriptor;
    const ssize_t got = recv(descriptor, &peer.vote, sizeof peer.vote, MSG_WAITALL);
    if (got == static_cast<ssize_t>(sizeof peer.vote) && is_sound(key_, peer.vote)) {
      Vote vote = peer.vote;
      if (vote.kind == VoteKind::kVote) {
        std::snprintf(vote.problem, sizeof vote.problem, "the arbiter has no descriptor left");
      }
      rounds_.hear(last_, vote, now_ms(), this);
    }
    end(last_);
  }
  reserve_ = open("/dev/null", O_RDONLY | O_CLOEXEC);
}

void Worker::read_from(Connection connection) {
  Peer& peer = peers_.at(connection);
  const ssize_t got = recv(peer.descriptor, reinterpret_cast<char*>(&peer.vote) + peer.size,
                           sizeof peer.vote - peer.size, 0);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (got <= 0) return end(connection);
  peer.size += static_cast<std::size_t>(got);
  if (peer.size < sizeof peer.vote) return;
  peer.size = 0;
  if (!is_sound(key_, peer.vote)) return end(connection);
  const Vote vote = peer.vote;
  rounds_.hear(connection, vote, now_ms(), this);
}

void Worker::run(const Process& launcher) {
  restore();
  reserve_ = open("/dev/null", O_RDONLY | O_CLOEXEC);
  epoll_ = epoll_create1(EPOLL_CLOEXEC);
  epoll_event event = {};
  event.events = EPOLLIN;
  event.data.u64 = 0;
  epoll_ctl(epoll_, EPOLL_CTL_ADD, listener_, &event);
  std::vector<epoll_event> events(1'024);
  std::uint64_t look_ms = now_ms(), round_ms = look_ms;
  for (;;) {
    const std::uint64_t now = now_ms();
    const std::uint64_t next = std::min(look_ms, round_ms);
    const int wait_ms = next > now ? static_cast<int>(next - now) : 0;
    const int count = epoll_wait(epoll_, events.data(), static_cast<int>(events.size()), wait_ms);
    for (int i = 0; i < count; ++i) {
      const Connection connection = events[static_cast<std::size_t>(i)].data.u64;
      if (connection == 0) {
        accept_all();
      } else if (peers_.count(connection) != 0) {
        read_from(connection);
      }
    }
    round_ms = rounds_.look_at_clock(now_ms(), this);
    if (now_ms() < look_ms) continue;
    look_ms = now_ms() + kLookMs;
    if (!launcher.lives()) return;
  }
}

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "dynamiccl-arbiter: %s: %s\n", what, std::strerror(errno));
  std::exit(kMachine);
}

/// Dual-stack, on all addresses; prints the port.
int listen_on(int port) {
  const int yes = 1, no = 0;
  int listener = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  sockaddr_in6 six = {};
  six.sin6_family = AF_INET6;
  six.sin6_port = htons(static_cast<std::uint16_t>(port));
  sockaddr_in four = {};
  four.sin_family = AF_INET;
  four.sin_port = six.sin6_port;
  auto* address = reinterpret_cast<sockaddr*>(&six);
  socklen_t size = sizeof six;
  if (listener < 0) {  // a kernel without IPv6
    listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    address = reinterpret_cast<sockaddr*>(&four);
    size = sizeof four;
  } else {
    setsockopt(listener, IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof no);
  }
  if (listener < 0) fail("no socket");
  setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  if (bind(listener, address, size) != 0 || listen(listener, 65'535) != 0) fail("cannot listen");
  getsockname(listener, address, &size);
  const std::uint16_t bound =
      address == reinterpret_cast<sockaddr*>(&six) ? six.sin6_port : four.sin_port;
  std::printf("%u\n", static_cast<unsigned>(ntohs(bound)));
  std::fflush(stdout);
  return listener;
}

/// Starts workers until the launcher's process has ended.
void keep(std::uint64_t job, const Key& key, int listener, int log, const Process& launcher) {
  sigset_t child;
  sigemptyset(&child);
  sigaddset(&child, SIGCHLD);
  sigprocmask(SIG_BLOCK, &child, nullptr);
  while (launcher.lives()) {
    const pid_t worker = fork();
    if (worker == 0) {
      Worker(job, key, listener, log).run(launcher);
      _exit(0);
    }
    // Memory may be short for a moment.
    const timespec look = {1, 0};
    for (int status = 0; worker > 0 && waitpid(worker, &status, WNOHANG) == 0;) {
      sigtimedwait(&child, nullptr, &look);
    }
    if (worker < 0) nanosleep(&look, nullptr);
  }
}

}  // namespace
}  // namespace dynamiccl

int main(int argc, char** argv) {
  using namespace dynamiccl;
  char* end = nullptr;
  if (argc < 3 || (std::strtoull(argv[1], &end, 16), *end != '\0')) {
    std::fprintf(stderr, "usage: dynamiccl-arbiter JOB KEY_FILE [PORT]\n");
    return kUsage;
  }
  const std::uint64_t job = std::strtoull(argv[1], nullptr, 16);
  Key key;
  std::ifstream file(argv[2], std::ios::binary);
  if (!file.read(reinterpret_cast<char*>(&key), sizeof key)) fail(argv[2]);
  rlimit files = {};
  getrlimit(RLIMIT_NOFILE, &files);
  files.rlim_cur = files.rlim_max;
  setrlimit(RLIMIT_NOFILE, &files);
  const int log = memfd_create("dynamiccl-arbiter", MFD_CLOEXEC);
  if (log < 0 || fcntl(log, F_SETFL, O_APPEND) != 0) fail("no log");
  const Process launcher(getppid());
  const int listener = listen_on(argc > 3 ? std::atoi(argv[3]) : 0);
  signal(SIGPIPE, SIG_IGN);
  if (fork() != 0) return 0;
  setsid();
  if (fork() != 0) _exit(0);
  for (int descriptor = 0; descriptor < 3; ++descriptor) close(descriptor);
  // Nothing that is opened later may become a standard descriptor.
  while (open("/dev/null", O_RDWR) < 2) {
  }
  keep(job, key, listener, log, launcher);
  return 0;
}
