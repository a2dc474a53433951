// The arbiter of a job on several hosts: two processes outside of the job's tree.
//
//   dynamiccl-arbiter PORT [PID...]
//
// dynamiccl-run starts it on the host of the first rank. It prints its port on one line (PORT may
// be 0) and goes into the background: a session of its own, with descriptors 0, 1, 2 and all that
// it was given closed, so that nobody waits for it who reads a launcher's output to its end or
// waits for all its children. It ends when all these processes have ended, the launcher and the
// first rank; with none named, when the one that started it has. From the environment, as
// dynamiccl-run sets it:
//
//   DYNAMICCL_JOB        whose arbiter this is: 16 hexadecimal digits
//   DYNAMICCL_KEY        of its messages: 32 hexadecimal digits
//   DYNAMICCL_KILL_FILE  while it exists no communicator gets a table
//
// The *keeper* holds the listening socket and the log (a memfd: no disk that could be full, nothing
// to remove) and starts the *worker* again when that is killed. The worker answers. It lives on
// when the keeper is killed.
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <vector>

#include "agree/rounds.h"
#include "agree/seal.h"
#include "platform/clock.h"

// The same on all processors; headers of older systems lack them.
#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif
#ifndef SYS_close_range
#define SYS_close_range 436
#endif

namespace dynamiccl {
namespace {

constexpr int kUsage = 2, kMachine = 4;
constexpr std::uint64_t kLookMs = 1'000;
/// Whether the kill file is there is not known after so long without a look: then no new tables.
constexpr std::uint64_t kKnownMs = 5'000;

/// Processes of others, each by a descriptor: a number may be somebody else's one day.
class Processes {
 public:
  void add(pid_t pid) {
    // glibc 2.36 has a function for it. A descriptor may be opened of a process of another user, as
    // Slurm's root, which /proc may hide.
    const auto descriptor = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
    if (descriptor >= 0) {
      descriptors_.push_back({descriptor, POLLIN, 0});
    } else if (errno != ESRCH) {
      numbers_.push_back(pid);  // Linux before 5.3, or a filter
    }
  }

  /// Whether any of them lives.
  bool live() const {
    std::vector<pollfd> ended = descriptors_;
    poll(ended.data(), ended.size(), 0);
    return std::any_of(ended.begin(), ended.end(),
                       [](const pollfd& one) { return !one.revents; }) ||
           std::any_of(numbers_.begin(), numbers_.end(),
                       [](pid_t pid) { return kill(pid, 0) == 0 || errno == EPERM; });
  }
  const std::vector<pollfd>& descriptors() const { return descriptors_; }

 private:
  std::vector<pollfd> descriptors_;
  std::vector<pid_t> numbers_;
};

class Worker final : private Outlet {
 public:
  Worker(std::uint64_t job, const Key& key, const char* kill_file, int listener, int log)
      : key_(key),
        kill_file_(kill_file),
        listener_(listener),
        log_(log),
        rounds_(job, limits_of_job()) {}

  /// Answers until all these have ended.
  void run(const Processes& processes);

 private:
  struct Peer {
    int descriptor = -1;
    Vote vote;  // what it sent last, or a part of it
    std::size_t size = 0;
    bool has_voted = false;
  };

  bool log(const Logged& table) override {
    const std::uint64_t absent_ms = absent_ms_;
    const bool is_killed =
        kill_file_ != nullptr && (absent_ms == 0 || monotonic_ms() - absent_ms > kKnownMs);
    return !is_killed && write(log_, &table, sizeof table) == static_cast<ssize_t>(sizeof table);
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
  void watch_kill_file();
  void accept_all();
  void answer_without_descriptors();
  void read_from(Connection connection);
  void end(Connection connection);

  Key key_;
  const char* kill_file_;                    // null: none
  std::atomic<std::uint64_t> absent_ms_{0};  // when it was seen not to be there; 0: it is there
  int listener_;
  int log_;
  Rounds rounds_;
  int epoll_ = -1;
  int reserve_ = -1;
  static constexpr Connection kListener = 0, kProcess = 1;
  Connection last_ = kProcess;
  std::unordered_map<Connection, Peer> peers_;
};

void Worker::restore() {
  Logged table;
  for (off_t at = 0; pread(log_, &table, sizeof table, at) == static_cast<ssize_t>(sizeof table);
       at += static_cast<off_t>(sizeof table)) {
    rounds_.restore(table);
  }
}

/// On a thread of its own: a file server that stalls must not keep ranks from their answers.
void Worker::watch_kill_file() {
  if (kill_file_ == nullptr) return;
  std::thread([this] {
    for (;; std::this_thread::sleep_for(std::chrono::milliseconds(100))) {
      absent_ms_ = access(kill_file_, F_OK) == 0 ? 0 : monotonic_ms();
    }
  }).detach();
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
      rounds_.hear(last_, vote, monotonic_ms(), this);
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
  rounds_.hear(connection, peer.vote, monotonic_ms(), this);
}

void Worker::run(const Processes& processes) {
  restore();
  watch_kill_file();
  reserve_ = open("/dev/null", O_RDONLY | O_CLOEXEC);
  epoll_ = epoll_create1(EPOLL_CLOEXEC);
  epoll_event event = {};
  event.events = EPOLLIN;
  event.data.u64 = kListener;
  epoll_ctl(epoll_, EPOLL_CTL_ADD, listener_, &event);
  event.data.u64 = kProcess;
  event.events = EPOLLIN | EPOLLONESHOT;  // one that has ended stays readable
  for (const pollfd& one : processes.descriptors())
    epoll_ctl(epoll_, EPOLL_CTL_ADD, one.fd, &event);
  std::vector<epoll_event> events(1'024);
  std::uint64_t look_ms = monotonic_ms(), round_ms = look_ms;
  for (;;) {
    const std::uint64_t now = monotonic_ms();
    const std::uint64_t next = std::min(look_ms, round_ms);
    const int wait_ms = next > now ? static_cast<int>(next - now) : 0;
    const int count = epoll_wait(epoll_, events.data(), static_cast<int>(events.size()), wait_ms);
    for (int i = 0; i < count; ++i) {
      const Connection connection = events[static_cast<std::size_t>(i)].data.u64;
      if (connection == kListener) {
        accept_all();
      } else if (connection == kProcess) {
        look_ms = 0;
      } else if (peers_.count(connection) != 0) {
        read_from(connection);
      }
    }
    round_ms = rounds_.look_at_clock(monotonic_ms(), this);
    if (monotonic_ms() < look_ms) continue;
    look_ms = monotonic_ms() + kLookMs;
    if (!processes.live()) return;
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

/// Starts workers until all these processes have ended.
void keep(std::uint64_t job, const Key& key, const char* kill_file, int listener, int log,
          const Processes& processes) {
  sigset_t child;
  sigemptyset(&child);
  sigaddset(&child, SIGCHLD);
  sigprocmask(SIG_BLOCK, &child, nullptr);
  while (processes.live()) {
    const pid_t worker = fork();
    if (worker == 0) {
      Worker(job, key, kill_file, listener, log).run(processes);
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

/// A number that is all of a text. Not strtoull, which glibc made anew in 2.38: the container may
/// have an older one than the machine that compiled this.
template <typename Number>
bool parse(std::string_view text, Number* number, int base) {
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), *number, base);
  return parsed.ec == std::errc() && parsed.ptr == text.data() + text.size();
}

std::string_view value(const char* variable) {
  const char* text = std::getenv(variable);
  return text != nullptr ? text : "";
}

}  // namespace
}  // namespace dynamiccl

int main(int argc, char** argv) {
  using namespace dynamiccl;
  int port = 0;
  std::vector<pid_t> numbers(argc > 2 ? static_cast<std::size_t>(argc - 2) : 0);
  bool is_sound = argc > 1 && parse(argv[1], &port, 10);
  for (int i = 2; i < argc; ++i) is_sound &= parse(argv[i], &numbers[i - 2], 10);
  if (!is_sound) {
    std::fprintf(stderr, "usage: dynamiccl-run dynamiccl-arbiter PORT [PID...]\n");
    return kUsage;
  }
  std::uint64_t job = 0;
  Key key;
  const std::string_view digits = value("DYNAMICCL_KEY");
  if (digits.size() != 32 || !parse(value("DYNAMICCL_JOB"), &job, 16) ||
      !parse(digits.substr(0, 16), &key.low, 16) || !parse(digits.substr(16), &key.high, 16)) {
    std::fprintf(stderr,
                 "dynamiccl-arbiter: DYNAMICCL_JOB and DYNAMICCL_KEY are not 16 and 32 hexadecimal "
                 "digits: start it with 'dynamiccl-run dynamiccl-arbiter PORT'\n");
    return kUsage;
  }
  // Pipes of a launcher or a shell, whose readers would wait for us.
  if (syscall(SYS_close_range, 3U, ~0U, 0U) != 0) {  // Linux before 5.9
    for (int descriptor = 3; descriptor < 1'024; ++descriptor) close(descriptor);
  }
  rlimit files = {};
  getrlimit(RLIMIT_NOFILE, &files);
  files.rlim_cur = files.rlim_max;
  setrlimit(RLIMIT_NOFILE, &files);
  const int log = memfd_create("dynamiccl-arbiter", MFD_CLOEXEC);
  if (log < 0 || fcntl(log, F_SETFL, O_APPEND) != 0) fail("no log");
  Processes processes;
  if (numbers.empty()) numbers.push_back(getppid());
  for (const pid_t number : numbers) processes.add(number);
  const int listener = listen_on(port);
  // What a launcher sends to all processes of a step (Slurm: --signal, and SIGTERM before the grace
  // time) is for the ranks.
  for (const int number : {SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGPIPE, SIGXCPU}) {
    signal(number, SIG_IGN);
  }
  const pid_t child = fork();
  if (child < 0) fail("cannot go into the background");
  if (child > 0) return 0;
  setsid();
  if (fork() != 0) _exit(0);
  for (int descriptor = 0; descriptor < 3; ++descriptor) close(descriptor);
  // Nothing that is opened later may become a standard descriptor.
  for (int descriptor = 0; descriptor < 3; ++descriptor) open("/dev/null", O_RDWR);
  [[maybe_unused]] const int moved = chdir("/");  // no file system stays busy
  keep(job, key, std::getenv("DYNAMICCL_KILL_FILE"), listener, log, processes);
  return 0;
}
