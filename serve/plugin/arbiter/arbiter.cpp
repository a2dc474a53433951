// The arbiter of a job on several hosts: two processes outside of the job's tree.
//
//   dynamiccl-arbiter PORT [PID...]
//
// dynamiccl-run starts it on the host of the first rank. It prints its port on one line (PORT may
// be 0) and goes into the background: a session of its own, with nothing left open of what it was
// given, so that nobody waits for it who reads a launcher's output to its end or waits for all its
// children. It ends when all these processes have ended, the launcher and the first rank; with none
// named, when the one that started it has.
//
// The *keeper* holds the listening socket and the log (a memfd: no disk that could be full, nothing
// to remove) and starts the *worker* again when that is killed. The worker answers. It lives on
// when the keeper is killed.
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#include <unordered_map>

#include "agree/rounds.h"
#include "agree/vote.h"
#include "arbiter/leader.h"

namespace dynamiccl {
namespace {

constexpr int kUsage = 2, kMachine = 4;
/// The same on all processors; headers of older systems lack them.
constexpr long kPidfdOpen = 434;
/// How often it looks whether its processes live.
constexpr std::uint64_t kLookMs = 200;

/// What a keeper gives to all its workers.
struct Given {
  /// By a descriptor too: a number may be somebody else's one day. One may be opened of a process
  /// of another user, as Slurm's root, which /proc may hide. None: Linux before 5.3, or a filter.
  void ends_with(pid_t pid) {
    const auto descriptor = static_cast<int>(syscall(kPidfdOpen, pid, 0));
    if (descriptor >= 0 || errno != ESRCH) processes.emplace_back(descriptor, pid);
  }

  bool has_ended() const {
    return std::none_of(processes.begin(), processes.end(), [](const auto& one) {
      pollfd ended = {one.first, POLLIN, 0};
      if (one.first < 0) return kill(one.second, 0) == 0 || errno == EPERM;
      return poll(&ended, 1, 0) == 0;
    });
  }

  std::uint64_t job = 0;
  Key key;
  std::vector<std::pair<int, pid_t>> processes;  // of others
  int listener = -1, log = -1;
  std::uint64_t instance = draw() >> 32 | 1;  // the upper half of all their questions
};

class Worker final : private Outlet {
 public:
  explicit Worker(const Given& given)
      : given_(given), rounds_(given.job, limits_of_job()), leader_(given.job) {
    Logged table;
    while (pread(given.log, &table, sizeof table, log_size_) == kLoggedBytes) {
      rounds_.restore(table);
      places_[table.round.comm] = log_size_;
      log_size_ += kLoggedBytes;
    }
  }

  /// Answers until the job has ended.
  void run() {
    if (epoll_ < 0 || !watch(given_.listener, kListener)) return;
    std::vector<epoll_event> events(1'024);
    for (;;) {
      const std::uint64_t now_ms = monotonic_ms();
      const std::uint64_t next_ms = rounds_.look_at_clock(now_ms, this);
      // Ranks that outlive these processes, and have confirmed, must not be left unanswered.
      const bool is_any_open = next_ms != ~std::uint64_t{0};
      if (!is_any_open && given_.has_ended()) return;
      const auto wait_ms = static_cast<int>(std::min(next_ms - now_ms, kLookMs));
      const int count = epoll_wait(epoll_, events.data(), static_cast<int>(events.size()), wait_ms);
      for (int i = 0; i < count; ++i) {
        const Connection connection = events[static_cast<std::size_t>(i)].data.u64;
        if (connection == kListener) accept_all();
        if (peers_.count(connection) != 0) read_from(connection);
      }
    }
  }

 private:
  struct Peer {
    int descriptor = -1;
    Vote vote;          // what it sent last
    std::string bytes;  // of a vote and its body, with room for what has not come yet
    std::size_t size = 0;
  };

  bool log(const Logged& table) override {
    if (table.round.number == 0 && leader_.may_see_kill_file()) return false;  // it has come since
    const off_t at = places_.emplace(table.round.comm, log_size_).first->second;
    if (at == log_size_) log_size_ += kLoggedBytes;
    return pwrite(given_.log, &table, sizeof table, at) == kLoggedBytes;
  }

  void send(Connection to, const Reply& reply) override {
    const auto found = peers_.find(to);
    if (found == peers_.end()) return;
    const auto& [descriptor, vote, heard, size] = found->second;
    Reply sealed = reply;
    sealed.mac = mac_of(given_.key, sealed, vote);
    std::string bytes(reinterpret_cast<const char*>(&sealed), sizeof sealed);
    if (reply.body_bytes > 0) bytes.append(leader_.body().begin(), leader_.body().end());
    // It fits into the buffer of a new connection; one that does not take it whole has broken.
    const ssize_t sent =
        ::send(descriptor, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent != static_cast<ssize_t>(bytes.size())) shutdown(descriptor, SHUT_RDWR);
  }

  std::uint64_t draw() override {
    return given_.instance << 32 | (dynamiccl::draw() & 0xffff'ffff);
  }

  const char* propose(const Vote& first, Reply* question) override {
    const char* why_not = leader_.propose(first, question);
    const std::vector<std::uint8_t>& body = leader_.body();
    question->body_bytes = static_cast<std::uint32_t>(body.size());
    if (!body.empty()) question->body_digest = siphash(given_.key, body.data(), body.size());
    return why_not;
  }

  void decided(const RoundKey& round, bool has_table) override {
    leader_.decided(round, has_table);
  }

  /// Whether received bytes are a vote under our key, of known numbers and a zero-terminated text,
  /// and about no other arbiter's question: who answers one of this job had an arbiter before this
  /// one, whose two processes were lost with their log, and others may have the table from it.
  /// Who only asks for an arbiter (communicator 0: prepare.cpp) hears nothing of one that is about
  /// to end: the next job of this name starts its own.
  bool may_answer(const Vote& vote) const {
    return vote.magic == kVoteMagic && vote.num_ranks >= 2 && vote.nonce != 0 &&
           vote.kind >= VoteKind::kVote && vote.kind <= VoteKind::kRecall &&
           vote.body_bytes <= kMostBodyBytes && vote.problem[kProblemBytes - 1] == '\0' &&
           vote.mac == mac_of(given_.key, vote) && (vote.round.comm != 0 || !given_.has_ended()) &&
           (vote.question == 0 || vote.question >> 32 == given_.instance);
  }

  bool watch(int descriptor, Connection connection) const {
    epoll_event event = {EPOLLIN, {}};
    event.data.u64 = connection;
    return epoll_ctl(epoll_, EPOLL_CTL_ADD, descriptor, &event) == 0;
  }

  void accept_all() {
    const int one = 1;
    for (;;) {
      const int descriptor =
          accept4(given_.listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
      if (descriptor < 0 && (errno == EMFILE || errno == ENFILE)) answer_without_descriptors();
      if (descriptor < 0) return;
      setsockopt(descriptor, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
      setsockopt(descriptor, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof one);
      peers_[++last_].descriptor = descriptor;
      if (!watch(descriptor, last_)) end(last_);
    }
  }

  /// The one descriptor that is kept for this: a vote becomes a problem of its rank, so that its
  /// round abstains at once; a recall is answered if its round is decided, and else asks again.
  void answer_without_descriptors() {
    close(reserve_);
    Peer& peer = peers_[++last_];
    peer.descriptor = accept4(given_.listener, nullptr, nullptr, SOCK_CLOEXEC);
    const timeval patience = {0, 100'000};
    setsockopt(peer.descriptor, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    const ssize_t got = recv(peer.descriptor, &peer.vote, sizeof peer.vote, MSG_WAITALL);
    if (got == static_cast<ssize_t>(sizeof peer.vote) && may_answer(peer.vote)) {
      std::strcpy(peer.vote.problem, "the arbiter has no descriptor left");
      rounds_.hear(last_, Vote(peer.vote), monotonic_ms(), this);
    }
    end(last_);
    reserve_ = open("/dev/null", O_RDONLY | O_CLOEXEC);
  }

  void read_from(Connection connection) {
    Peer& peer = peers_.at(connection);
    if (peer.size == 0) peer.bytes.resize(sizeof peer.vote);
    const std::size_t room = peer.bytes.size() - peer.size;
    const ssize_t got = recv(peer.descriptor, &peer.bytes[peer.size], room, 0);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (got <= 0) return end(connection);
    peer.size += static_cast<std::size_t>(got);
    if (peer.size < peer.bytes.size()) return;
    if (peer.size == sizeof peer.vote) {
      std::memcpy(&peer.vote, peer.bytes.data(), sizeof peer.vote);
      if (!may_answer(peer.vote)) return end(connection);
      peer.bytes.resize(sizeof peer.vote + peer.vote.body_bytes);
      if (peer.vote.body_bytes > 0) return;  // which comes next
    }
    peer.size = 0;
    const Vote vote = peer.vote;
    if (vote.body_bytes > 0) {
      const std::string body = peer.bytes.substr(sizeof vote);
      if (vote.body_digest != siphash(given_.key, body.data(), body.size())) return end(connection);
      if (vote.round.job == given_.job) leader_.hear(vote, body);
    }
    rounds_.hear(connection, vote, monotonic_ms(), this);
  }

  void end(Connection connection) {
    close(peers_.at(connection).descriptor);
    peers_.erase(connection);
    rounds_.gone(connection, this);
  }

  static constexpr ssize_t kLoggedBytes = sizeof(Logged);
  static constexpr Connection kListener = 0;

  const Given given_;
  off_t log_size_ = 0;
  std::unordered_map<std::uint64_t, off_t> places_;  // of communicators, in the log
  Rounds rounds_;
  Leader leader_;
  int reserve_ = open("/dev/null", O_RDONLY | O_CLOEXEC), epoll_ = epoll_create1(EPOLL_CLOEXEC);
  Connection last_ = kListener;
  std::unordered_map<Connection, Peer> peers_;
};

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "dynamiccl-arbiter: %s: %s\n", what, std::strerror(errno));
  std::exit(kMachine);
}

/// Dual-stack, on all addresses; prints the port.
int listen_on(std::uint16_t port) {
  const int yes = 1, no = 0;
  sockaddr_in6 address = {};
  address.sin6_family = AF_INET6;
  address.sin6_port = htons(port);
  socklen_t size = sizeof address;
  int listener = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (listener >= 0) {
    setsockopt(listener, IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof no);
  } else {  // a kernel without IPv6; the port is at one place in both
    listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    address.sin6_family = AF_INET;
    size = sizeof(sockaddr_in);
  }
  if (listener < 0) fail("no socket");
  setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  auto* any = reinterpret_cast<sockaddr*>(&address);
  if (bind(listener, any, size) != 0 || listen(listener, 65'535) != 0) fail("cannot listen");
  getsockname(listener, any, &size);
  std::printf("%u\n", static_cast<unsigned>(ntohs(address.sin6_port)));
  std::fflush(stdout);
  return listener;
}

/// Starts workers until the job has ended.
void keep(const Given& given) {
  constexpr int kLeastMs = 50, kPauseMs = 100;
  while (!given.has_ended()) {
    const std::uint64_t from_ms = monotonic_ms();
    const pid_t worker = fork();
    if (worker == 0) {
      (new Worker(given))->run();  // never destroyed: that would wait for the brain's thread
      _exit(0);
    }
    waitpid(worker, nullptr, 0);
    // What a worker has none of, memory or descriptors, may come back.
    if (worker < 0 || monotonic_ms() - from_ms < kLeastMs) poll(nullptr, 0, kPauseMs);
  }
}

}  // namespace
}  // namespace dynamiccl

int main(int argc, char** argv) {
  using namespace dynamiccl;
  // Pipes of a launcher or a shell, whose readers would wait for us.
  close_others();
  // Nor may what is opened next take the place of a standard one that is closed.
  int standard = 0;
  while (standard >= 0 && standard < 3) standard = open("/dev/null", O_RDWR | O_CLOEXEC);
  close(standard);
  constexpr std::uint64_t kMostPort = 65'535, kMostPid = 0x7fff'ffff;
  std::uint64_t port = 0, pid = 0;
  bool is_sound = argc > 1 && parse_number(argv[1], &port) && port <= kMostPort;
  Given given;
  if (argc == 2) given.ends_with(getppid());
  for (int i = 2; i < argc && is_sound; ++i) {
    is_sound = parse_number(argv[i], &pid) && pid <= kMostPid;
    given.ends_with(static_cast<pid_t>(pid));
  }
  if (!is_sound) {
    std::fprintf(stderr, "usage: dynamiccl-run dynamiccl-arbiter PORT [PID...]\n");
    return kUsage;
  }
  if (!parse_hex(value_of("DYNAMICCL_JOB"), 1, &given.job) ||
      !parse_hex(value_of("DYNAMICCL_KEY"), 2, given.key.halves)) {
    std::fprintf(stderr,
                 "dynamiccl-arbiter: DYNAMICCL_JOB and DYNAMICCL_KEY are not 16 and 32 hexadecimal "
                 "digits: start it with 'dynamiccl-run dynamiccl-arbiter PORT'\n");
    return kUsage;
  }
  rlimit files = {};
  getrlimit(RLIMIT_NOFILE, &files);
  files.rlim_cur = files.rlim_max;
  setrlimit(RLIMIT_NOFILE, &files);
  given.log = memfd_create("dynamiccl-arbiter", MFD_CLOEXEC);
  if (given.log < 0) fail("no log");
  given.listener = listen_on(static_cast<std::uint16_t>(port));
  // What a launcher sends to all processes of a step (Slurm: --signal, and SIGTERM before the grace
  // time) is for the ranks.
  for (const int number : {SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGPIPE, SIGXCPU}) {
    signal(number, SIG_IGN);
  }
  signal(SIGCHLD, SIG_DFL);  // who has ended keeps its number until it is waited for
  // Descriptors 0, 1, 2 are /dev/null's from here on: nothing may become a standard descriptor.
  if (daemon(0, 0) != 0) fail("cannot go into the background");
  keep(given);
  return 0;
}
