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
// and those of the leader (leader.h).
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
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "agree/rounds.h"
#include "agree/seal.h"
#include "arbiter/leader.h"
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

/// Whether received bytes are a vote under this key: known numbers, a zero-terminated text.
bool is_sound(const Key& key, const Vote& vote) noexcept {
  return vote.magic == kVoteMagic && vote.num_ranks >= 2 && vote.nonce != 0 &&
         vote.kind >= VoteKind::kVote && vote.kind <= VoteKind::kRecall &&
         vote.body_bytes <= kMostBodyBytes && vote.problem[kProblemBytes - 1] == '\0' &&
         vote.mac == mac_of(key, vote);
}

constexpr int kUsage = 2, kMachine = 4;
constexpr std::uint64_t kLookMs = 1'000;

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
  Worker(std::uint64_t job, const Key& key, std::uint64_t instance, int listener, int log)
      : job_(job),
        key_(key),
        instance_(instance),
        listener_(listener),
        log_(log),
        rounds_(job, limits_of_job()),
        leader_(job) {}

  /// Answers until all these have ended.
  void run(const Processes& processes);

 private:
  struct Peer {
    int descriptor = -1;
    Vote vote;  // what it sent last, or a part of it
    std::string body;
    std::size_t size = 0;  // of both
  };

  bool log(const Logged& table) override {
    if (table.round.number == 0 && leader_.may_see_kill_file()) return false;  // it has come since
    const off_t at = places_.emplace(table.round.comm, log_size_).first->second;
    if (at == log_size_) log_size_ += static_cast<off_t>(sizeof table);
    return pwrite(log_, &table, sizeof table, at) == static_cast<ssize_t>(sizeof table);
  }
  void send(Connection to, const Reply& reply) override;
  std::uint64_t draw() override { return instance_ << 32 | (dynamiccl::draw() & 0xffff'ffff); }
  const char* propose(const Vote& first, Reply* question) override {
    const char* why_not = leader_.propose(first, question);
    if (why_not != nullptr || leader_.body().empty()) return why_not;
    question->body_bytes = static_cast<std::uint32_t>(leader_.body().size());
    question->body_digest = siphash(key_, leader_.body().data(), leader_.body().size());
    return nullptr;
  }
  void decided(const RoundKey& round, std::uint32_t, const Reply& reply) override {
    leader_.decided(round, reply.kind == ReplyKind::kTable);
  }

  void restore();
  void hear(Connection from, const Vote& vote);
  void accept_all();
  void answer_without_descriptors();
  void read_from(Connection connection);
  void end(Connection connection);

  std::uint64_t job_;
  Key key_;
  std::uint64_t instance_;  // the upper half of all questions of this keeper's workers
  int listener_;
  int log_;
  off_t log_size_ = 0;
  std::unordered_map<std::uint64_t, off_t> places_;  // of communicators, in the log
  Rounds rounds_;
  Leader leader_;
  int epoll_ = -1;
  int reserve_ = -1;
  static constexpr Connection kListener = 0, kProcess = 1;
  Connection last_ = kProcess;
  std::unordered_map<Connection, Peer> peers_;
};

void Worker::restore() {
  Logged table;
  while (pread(log_, &table, sizeof table, log_size_) == static_cast<ssize_t>(sizeof table)) {
    rounds_.restore(table);
    places_[table.round.comm] = log_size_;
    log_size_ += static_cast<off_t>(sizeof table);
  }
}

/// Who answers another arbiter's question, of this job, had one before this one, whose two
/// processes were lost with their log. Others may have had the table from it, so there is no
/// answer.
void Worker::hear(Connection from, const Vote& vote) {
  if (vote.question == 0 || vote.question >> 32 == instance_) {
    return rounds_.hear(from, vote, monotonic_ms(), this);
  }
  Reply reply;
  reply.kind = ReplyKind::kStranger;
  std::snprintf(reply.reason, sizeof reply.reason, "another arbiter of this job asked that");
  send(from, reply);
}

void Worker::send(Connection to, const Reply& reply) {
  const auto found = peers_.find(to);
  if (found == peers_.end()) return;
  Reply sealed = reply;
  sealed.mac = mac_of(key_, sealed, found->second.vote);
  iovec parts[] = {{&sealed, sizeof sealed},
                   {const_cast<std::uint8_t*>(leader_.body().data()), reply.body_bytes}};
  msghdr message = {};
  message.msg_iov = parts;
  message.msg_iovlen = 2;
  const auto wanted = static_cast<ssize_t>(sizeof sealed + reply.body_bytes);
  // It fits into the buffer of a new connection; one that does not take it whole has broken.
  if (sendmsg(found->second.descriptor, &message, MSG_NOSIGNAL | MSG_DONTWAIT) != wanted) {
    shutdown(found->second.descriptor, SHUT_RDWR);
  }
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
      hear(last_, vote);
    }
    end(last_);
  }
  reserve_ = open("/dev/null", O_RDONLY | O_CLOEXEC);
}

void Worker::read_from(Connection connection) {
  Peer& peer = peers_.at(connection);
  const bool is_in_body = peer.size >= sizeof peer.vote;
  const std::size_t at = peer.size - (is_in_body ? sizeof peer.vote : 0);
  char* to = is_in_body ? &peer.body[at] : reinterpret_cast<char*>(&peer.vote) + at;
  const std::size_t room = (is_in_body ? peer.body.size() : sizeof peer.vote) - at;
  const ssize_t got = recv(peer.descriptor, to, room, 0);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (got <= 0) return end(connection);
  peer.size += static_cast<std::size_t>(got);
  if (peer.size < sizeof peer.vote) return;
  if (!is_in_body) {
    if (!is_sound(key_, peer.vote)) return end(connection);
    peer.body.resize(peer.vote.body_bytes);
  }
  if (peer.size < sizeof peer.vote + peer.body.size()) return;
  peer.size = 0;
  const Vote vote = peer.vote;
  if (!peer.body.empty()) {
    if (vote.body_digest != siphash(key_, peer.body.data(), peer.body.size())) {
      return end(connection);
    }
    if (vote.round.job == job_) leader_.hear(vote, peer.body);
  }
  hear(connection, vote);
}

void Worker::run(const Processes& processes) {
  restore();
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
    // Ranks that outlive these processes, and have confirmed, must not be left without an answer.
    const bool is_any_open = round_ms != ~std::uint64_t{0};
    if (!is_any_open && !processes.live()) return;
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
void keep(std::uint64_t job, const Key& key, int listener, int log, const Processes& processes) {
  sigset_t child;
  sigemptyset(&child);
  sigaddset(&child, SIGCHLD);
  sigprocmask(SIG_BLOCK, &child, nullptr);
  const std::uint64_t instance = draw() >> 32 | 1;
  while (processes.live()) {
    const pid_t worker = fork();
    if (worker == 0) {
      Worker(job, key, instance, listener, log).run(processes);
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
  const std::string digits = text_of("DYNAMICCL_KEY");
  if (digits.size() != 32 || !parse(text_of("DYNAMICCL_JOB"), &job, 16) ||
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
  if (log < 0) fail("no log");
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
  keep(job, key, listener, log, processes);
  return 0;
}
