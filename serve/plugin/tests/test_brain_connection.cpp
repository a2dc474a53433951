// A brain process that is slow, dead, strange or somebody else's costs time and nothing more. What
// dynamiccl-brain refuses of questions is in tests/serve/test_torch_brain.py.
#include <sys/wait.h>

#include <cstring>
#include <functional>
#include <thread>

#include "arbiter/brain_thread.h"
#include "platform/clock.h"
#include "tests/check.h"
#include "tests/table_file.h"

using namespace dynamiccl;
using namespace std::string_literals;

namespace {

constexpr timeval kShort = {0, 300'000};

const Bytes kTable = table_of(1, 8, {kRing, kLL, 8, 1, 0});
const std::string kTableText(kTable.begin(), kTable.end());
const BrainAsk kQuestion = {"/artifact", "box", 1, 8, {}, {}};

int listen_at(const std::string& path, int backlog) {
  unlink(path.c_str());
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::strcpy(address.sun_path, path.c_str());
  const int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  CHECK(bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
  CHECK(listen(listener, backlog) == 0);
  return listener;
}

/// A brain that answers each question with `answer`, one connection after the other.
class Server {
 public:
  using Answer = std::function<void(int connection, std::uint64_t number)>;

  Server(const std::string& path, const Answer& answer)
      : listener_(listen_at(path, 4)), thread_([this, answer] { run(answer); }) {}
  ~Server() {
    for (const int descriptor : {listener_, connection_.load()}) shutdown(descriptor, SHUT_RDWR);
    thread_.join();
    close(listener_);
  }

 private:
  void run(const Answer& answer) {
    MessageHeader header;
    std::string body;
    while ((connection_ = accept(listener_, nullptr, nullptr)) >= 0) {
      while (receive_message(connection_, &header, &body) == nullptr) {
        answer(connection_, header.number);
      }
      close(connection_);
    }
  }

  const int listener_;
  std::atomic<int> connection_{-1};
  std::thread thread_;
};

Server::Answer raw(const std::string& bytes) {
  return [bytes](int connection, std::uint64_t) {
    CHECK(send(connection, bytes.data(), bytes.size(), MSG_NOSIGNAL) > 0);
  };
}

Server::Answer message(MessageKind kind, const std::string& body, std::uint64_t more = 0) {
  return [=](int connection, std::uint64_t number) {
    CHECK(send_message(connection, kind, number + more, body) == nullptr);
  };
}

const Server::Answer kGood = message(MessageKind::kTable, kTableText);

/// Why it gives no table; empty where it gives the good one.
std::string why_not(BrainConnection* brain) {
  const BrainAnswer asked = brain->ask(kQuestion);
  if (asked.problem.empty()) return asked.table == kTable ? "" : "it keeps";
  CHECK(asked.table.empty());
  return asked.problem.substr(asked.problem.rfind(": ") + 2);
}

void hang_up(int connection, std::uint64_t) { shutdown(connection, SHUT_RDWR); }

void byte_by_byte(int connection, std::uint64_t number) {
  int ends[2];
  CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
  kGood(ends[0], number);
  close(ends[0]);
  for (char byte; read(ends[1], &byte, 1) == 1;) raw({byte})(connection, number);
  close(ends[1]);
}

void good_and_bad_answers(const std::string& path) {
  const std::string none = "it sends something that is no message";
  const std::vector<std::pair<Server::Answer, std::string>> cases = {
      {byte_by_byte, ""},
      {message(MessageKind::kKeep, ""), "it keeps"},
      {message(MessageKind::kError, "no\n\x07\xff"), "no???"},
      {message(MessageKind::kError, ""), "it gives no reason"},
      {raw(std::string(64, 'H')), none},
      {raw("\x18\0\0\0this is no message here."s), none},
      {raw("\0\0\0\0"s), none},
      {raw("\x17\0\0\0"s), none},
      {raw("\xff\xff\xff\xff"), none},
      {message(MessageKind::kKeep, "x"), none},
      {message(MessageKind::kTable, ""), none},
      {message(MessageKind::kTable, std::string(kMaxFileBytes + 1, 'x')), none},
      {message(MessageKind::kAsk, ""), none},
      {message(static_cast<MessageKind>(99), ""), none},
      {message(MessageKind::kKeep, "", 1), "it answers another question"},
      {raw("\x18\0\0\0DCBRAIN\0\2\0\0\0\3\0\0\0a number"s), "it speaks another version"},
      {hang_up, "it closed the connection"},
  };
  std::size_t turn = 0;  // each other answer is a good one
  const Server server(path, [&](int connection, std::uint64_t number) {
    (turn % 2 == 0 ? kGood : cases[turn / 2].first)(connection, number);
    ++turn;
  });
  BrainConnection brain(path);
  for (const auto& [answer, why] : cases) {
    CHECK(why_not(&brain).empty());
    CHECK(why_not(&brain) == why);
  }
}

/// The longest question that exists.
void full_history(const std::string& path) {
  BrainAsk question = {std::string(kMaxArtifactBytes, 'a'), "box", 1, 8, kTable, {}};
  const TimedCall call = {1 << 20, 50.0, -1.0, 0.25, kRing, kLL, 8};
  for (int i = 0; i < kNumCollectives * kMaxBins; ++i) {
    question.tasks.push_back({i / kMaxBins, i % kMaxBins, 8 + i, {kWindow, call}});
  }
  const Server server(path, kGood);
  CHECK(BrainConnection(path).ask(question).table == kTable);
}

void slow_and_dead(const std::string& path) {
  const std::string long_path(108, 'p');
  BrainConnection nowhere(long_path), brain(path), hasty(path, kShort);
  CHECK(nowhere.ask(kQuestion).problem == "brain at " + long_path + ": its path is too long");
  {
    const Server server(path, [](int, std::uint64_t) {});
    const std::uint64_t from_ms = monotonic_ms();
    CHECK(why_not(&hasty) == "it does not answer in time");
    CHECK(monotonic_ms() - from_ms < 5'000);
  }
  CHECK(why_not(&brain) == "nobody listens there");  // its socket outlived it
  const int listener = listen_at(path, 0), other = socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un address = {};
  socklen_t size = sizeof address;
  auto* at = reinterpret_cast<sockaddr*>(&address);
  CHECK(getsockname(listener, at, &size) == 0 && connect(other, at, size) == 0);
  CHECK(why_not(&hasty) == "it does not take the connection in time");
  for (const int descriptor : {listener, other}) close(descriptor);
  unlink(path.c_str());
  CHECK(why_not(&brain) == "nobody listens there");
  const Server server(path, kGood);  // started at last
  CHECK(why_not(&brain).empty());
}

/// Who listens at it is somebody else.
void peer_that_is_not_us(const std::string& path) {
  if (geteuid() != 0) return;
  const int listener = listen_at(path, 4);
  const pid_t child = fork();
  if (child == 0) _exit(setuid(12345) != 0 || listen(listener, 4) != 0);  // notes who listens
  int status = 1;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
  BrainConnection brain(path);
  CHECK(why_not(&brain) == "it runs as another user");
  close(listener);
}

/// A new artifact comes while a brain thinks about the one before: its answer is nobody's.
void forgotten_question(const std::string& path) {
  bool is_first = true;
  const Server server(path, [&is_first](int connection, std::uint64_t number) {
    if (is_first) sleep_ns(300'000'000);
    (is_first ? message(MessageKind::kError, "old") : kGood)(connection, number);
    is_first = false;
  });
  static auto* brains = new BrainThread;  // its thread lives as long as the process
  setenv("DYNAMICCL_BRAIN_SOCKET", path.c_str(), 1);
  CHECK(brains->ask(1, kQuestion));
  CHECK(!brains->ask(1, kQuestion));
  sleep_ns(100'000'000);
  brains->forget(1);
  CHECK(brains->ask(1, kQuestion));
  std::unique_ptr<BrainAnswer> got;
  for (int i = 0; i < 1'000 && got == nullptr; ++i) {
    sleep_ns(5'000'000);
    got = brains->take(1);
  }
  CHECK(got != nullptr && got->problem.empty() && got->table == kTable);
}

}  // namespace

int main(int, char** arguments) {
  const std::string path = std::string(arguments[1]) + "/brain.sock";
  for (auto* test : {good_and_bad_answers, full_history, slow_and_dead, peer_that_is_not_us,
                     forgotten_question}) {
    test(path);
  }
  unlink(path.c_str());
  return g_failures;
}
