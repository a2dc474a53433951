// The arbiter of a job: started on the host of the first rank, found from all of them.
#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <functional>

#include "platform/clock.h"
#include "prepare/prepare.h"

namespace dynamiccl {
namespace {

constexpr std::uint64_t kNsPerMs = 1'000'000;
/// How long one address may take, and the first and longest pause before all are tried again.
constexpr std::uint64_t kAnswerMs = 1'000, kShortestPauseMs = 50, kLongestPauseMs = 1'000;

/// The first line that `work` writes, in processes of its own, until `until_ms`: neither a name
/// server nor a silent port is waited for longer.
std::string said_by(const std::function<void(int out)>& work, std::uint64_t until_ms) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return "";
  prctl(PR_SET_CHILD_SUBREAPER, 1);  // none of them is left to the job
  const pid_t group = fork();
  if (group == 0) {
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    close(STDOUT_FILENO);  // whoever reads our output to its end does not wait for them
    work(ends[1]);
    _exit(0);
  }
  close(ends[1]);
  char text[256] = "";
  if (group > 0) {
    setpgid(group, group);
    const std::uint64_t now = monotonic_ms();
    pollfd answer = {ends[0], POLLIN, 0};
    if (poll(&answer, 1, until_ms > now ? static_cast<int>(until_ms - now) : 0) > 0) {
      [[maybe_unused]] const ssize_t got = read(ends[0], text, sizeof text - 1);
    }
    kill(-group, SIGKILL);
    while (waitpid(-group, nullptr, 0) > 0) {
    }
  }
  close(ends[0]);
  const std::string lines = text;
  return lines.substr(0, lines.find('\n'));
}

/// Writes an address if our arbiter answers there. It is asked by a recall of communicator 0, which
/// none is: an arbiter has no table for that, and says so under the key.
void ask(std::uint64_t job, const Key& key, const addrinfo& to, int out) {
  Vote hello;
  hello.num_ranks = 2;
  hello.round.job = job;
  hello.nonce = draw();
  hello.kind = VoteKind::kRecall;
  hello.mac = mac_of(key, hello);
  Reply reply;
  const timeval patience = {kAnswerMs / 1'000, 0};
  const int descriptor = socket(to.ai_family, SOCK_STREAM, 0);
  setsockopt(descriptor, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
  setsockopt(descriptor, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  if (connect(descriptor, to.ai_addr, to.ai_addrlen) != 0 ||
      send(descriptor, &hello, sizeof hello, MSG_NOSIGNAL) != sizeof hello ||
      recv(descriptor, &reply, sizeof reply, MSG_WAITALL) != sizeof reply ||
      !is_sound(key, reply, hello) || reply.kind == ReplyKind::kStranger) {
    return;
  }
  char host[NI_MAXHOST] = "", port[NI_MAXSERV] = "";
  getnameinfo(to.ai_addr, to.ai_addrlen, host, sizeof host, port, sizeof port,
              NI_NUMERICHOST | NI_NUMERICSERV);
  const bool is_six = to.ai_family == AF_INET6;
  const std::string line = (is_six ? "[" : "") + std::string(host) + (is_six ? "]:" : ":") + port;
  // A zone, as fe80::1%eth0 has, is another one on the next host.
  if (line.find('%') != std::string::npos) return;
  [[maybe_unused]] const ssize_t sent = write(out, (line + "\n").c_str(), line.size() + 1);
}

}  // namespace

std::string find_arbiter(std::uint64_t job, const Key& key, const std::vector<Endpoint>& endpoints,
                         std::uint64_t limit_ms) {
  const auto ask_all = [&](int out) {
    for (const Endpoint& endpoint : endpoints) {
      if (fork() != 0) continue;
      addrinfo kind = {}, *list = nullptr;
      kind.ai_socktype = SOCK_STREAM;
      if (getaddrinfo(endpoint.host.c_str(), endpoint.port.c_str(), &kind, &list) != 0) _exit(0);
      for (; list != nullptr; list = list->ai_next) {
        if (fork() != 0) continue;
        ask(job, key, *list, out);
        _exit(0);
      }
      _exit(0);
    }
  };
  const std::uint64_t until_ms = monotonic_ms() + std::max(limit_ms, kAnswerMs);
  for (std::uint64_t pause_ms = kShortestPauseMs;;) {
    const std::string found = said_by(ask_all, until_ms);
    if (!found.empty() || limit_ms == 0 || monotonic_ms() + pause_ms >= until_ms) return found;
    sleep_ns(pause_ms * kNsPerMs);
    pause_ms = std::min(2 * pause_ms, kLongestPauseMs);
  }
}

bool start_arbiter(const std::string& program, const Words& words, bool may_speak) {
  const pid_t child = fork();
  if (child == 0) {
    // The port that it prints is not for the shell that evaluates our output.
    const int nowhere = open("/dev/null", O_RDWR | O_CLOEXEC);
    dup2(nowhere, STDOUT_FILENO);
    if (!may_speak) dup2(nowhere, STDERR_FILENO);
    std::vector<char*> arguments = {const_cast<char*>(program.c_str())};
    for (const std::string& word : words) arguments.push_back(const_cast<char*>(word.c_str()));
    arguments.push_back(nullptr);
    execv(program.c_str(), arguments.data());
    std::perror(program.c_str());
    _exit(127);
  }
  int status = 1;
  return child > 0 && waitpid(child, &status, 0) == child && status == 0;
}

}  // namespace dynamiccl
