// A brain process that is slow, dead, strange or somebody else's costs time and nothing more.
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <string>
#include <thread>

#include "arbiter/brain_thread.h"
#include "brain/connection.h"
#include "file.h"
#include "platform/clock.h"
#include "tests/check.h"
#include "tests/table_file.h"

using namespace dynamiccl;

namespace {

constexpr BrainLimits kShort = {200, 300};
constexpr BrainLimits kLong = {5'000, 20'000};  // under sanitizers, on a busy machine

enum : std::uint32_t { kBrainAsk = 1, kBrainTable = 2, kBrainKeep = 3, kBrainError = 4 };

int listen_at(const std::string& path, int backlog = 4) {
  unlink(path.c_str());
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::strcpy(address.sun_path, path.c_str());
  const int descriptor = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  CHECK(bind(descriptor, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
  CHECK(listen(descriptor, backlog) == 0);
  return descriptor;
}

bool read_exactly(int descriptor, std::uint8_t* bytes, std::size_t size) {
  for (std::size_t done = 0; done < size;) {
    const ssize_t got = read(descriptor, bytes + done, size - done);
    if (got <= 0) return false;
    done += static_cast<std::size_t>(got);
  }
  return true;
}

/// The number of the question that was read; 0 when the client has gone.
std::uint64_t read_ask(int descriptor) {
  std::uint8_t length[4];
  if (!read_exactly(descriptor, length, sizeof length)) return 0;
  Bytes ask(read_unsigned(length, 4));
  return read_exactly(descriptor, ask.data(), ask.size()) ? read_unsigned(ask.data() + 16, 8) : 0;
}

Bytes answer(std::uint64_t number, std::uint32_t kind, const Bytes& body,
             std::uint32_t version = 1) {
  Bytes bytes;
  append(&bytes, 24 + body.size(), 4);
  const std::string magic("DCBRAIN\0", 8);
  bytes.insert(bytes.end(), magic.begin(), magic.end());
  append(&bytes, version, 4);
  append(&bytes, kind, 4);
  append(&bytes, number, 8);
  bytes.insert(bytes.end(), body.begin(), body.end());
  return bytes;
}

void write_all(int descriptor, const Bytes& bytes) {
  CHECK(send(descriptor, bytes.data(), bytes.size(), MSG_NOSIGNAL) ==
        static_cast<ssize_t>(bytes.size()));
}

/// Runs `serve` on every connection, one after the other, until the socket is shut down.
class Server {
 public:
  Server(const std::string& path, const std::function<void(int)>& serve)
      : listener_(listen_at(path)), thread_([this, serve] { run(serve); }) {}
  ~Server() {
    shutdown(listener_, SHUT_RDWR);
    thread_.join();
    close(listener_);
  }
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

 private:
  void run(const std::function<void(int)>& serve) const {
    for (int connection; (connection = accept(listener_, nullptr, nullptr)) >= 0;) {
      serve(connection);
      close(connection);
    }
  }

  int listener_;
  std::thread thread_;
};

class Client : public BrainConnection {
 public:
  explicit Client(const std::string& path, const BrainLimits& limits = kLong)
      : BrainConnection(path, limits) {}

  BrainAnswer ask(const BrainAsk& question = {"/artifact", "box", 1, 8, {}, {}}) {
    return BrainConnection::ask(question);
  }

  /// Whether it fails with `why`.
  bool fails(const char* why) {
    const BrainAnswer asked = ask();
    if (asked.table.empty() && asked.problem.find(why) != std::string::npos) return true;
    std::fprintf(stderr, "said: %s\n", asked.problem.c_str());
    return false;
  }
};

const Bytes& good_table() {
  static const Bytes table = table_of(1, 8, {kRing, kLL, 8, 1, 0});
  return table;
}

/// Answers every question with the whole of a table.
void serve_tables(int connection) {
  while (const std::uint64_t number = read_ask(connection)) {
    write_all(connection, answer(number, kBrainTable, good_table()));
  }
}

void tables_keeps_and_errors(const std::string& path) {
  const Server server(path, [](int connection) {
    write_all(connection, answer(read_ask(connection), kBrainTable, good_table()));
    write_all(connection, answer(read_ask(connection), kBrainKeep, {}));
    write_all(connection, answer(read_ask(connection), kBrainError, {'n', 'o', '\n', 0x07, 0xff}));
    write_all(connection, answer(read_ask(connection), kBrainError, {}));
    for (const std::uint8_t byte : answer(read_ask(connection), kBrainTable, good_table())) {
      write_all(connection, {byte});
    }
  });
  Client client(path);
  const BrainAnswer table = client.ask();
  CHECK(table.problem.empty() && table.table == good_table());
  const BrainAnswer kept = client.ask();
  CHECK(kept.problem.empty() && kept.table.empty());
  CHECK(client.ask().problem == "brain at " + path + ": no???");
  CHECK(client.ask().problem == "brain at " + path + ": it gives no reason");
  CHECK(client.ask().table == good_table());
}

/// The longest question that exists, and those that a brain in C++ refuses; what it reads of others
/// is in tests/serve/test_torch_brain.py.
void full_history_goes_through(const std::string& path) {
  BrainAsk ask = {"/artifact", "box", 1, 8, good_table(), {}};
  const TimedCall call = {1 << 20, 50.0, -1.0, 0.25, kRing, kLL, 8};
  for (int i = 0; i < kNumCollectives * kMaxBins; ++i) {
    const std::int64_t num_timed = i % 3 == 0 ? -1 : 8 + i;
    ask.tasks.push_back({i / kMaxBins, i % kMaxBins, num_timed, {kWindow, call}});
  }
  ask.tasks[1] = {0, 1, 1, {call}};
  const std::string bytes = encode_ask(7, ask);
  std::uint64_t number = 0;
  BrainAsk read;
  CHECK(decode_ask(bytes.substr(kBrainLengthBytes), &number, &read) == nullptr && number == 7);
  CHECK(read.table == ask.table && read.tasks.size() == ask.tasks.size());
  CHECK(read.tasks[3].num_timed == -1 && read.tasks[1000].num_timed == 1008 % 256);
  for (const std::size_t size : {0UL, 23UL, 24UL, bytes.size() - 5}) {
    CHECK(decode_ask(bytes.substr(kBrainLengthBytes, size), &number, &read) != nullptr);
  }
  CHECK(decode_ask(bytes.substr(kBrainLengthBytes) + "x", &number, &read) != nullptr);
  for (const auto& spoil : std::vector<std::function<void(TimedTask*)>>{
           [](TimedTask* task) { task->calls.push_back(task->calls[0]); },
           [](TimedTask* task) { task->collective = 5; }, [](TimedTask* task) { task->bin = -1; },
           [](TimedTask* task) { task->bin = kMaxBins; },
           [](TimedTask* task) { task->calls[7].time_us = 0.0; },
           [](TimedTask* task) { task->calls[7].skew_us = 0.0 / 0.0; },
           [](TimedTask* task) { task->calls[7].algorithm = 7; },
           [](TimedTask* task) { task->calls[7].protocol = -2; },
           [](TimedTask* task) { task->calls[7].num_channels = 65; }}) {
    BrainAsk odd = ask;
    spoil(&odd.tasks[0]);
    const char* why = decode_ask(encode_ask(7, odd).substr(kBrainLengthBytes), &number, &read);
    CHECK(why != nullptr && std::string(why) == "its history is impossible");
  }
  const Server server(path, serve_tables);
  CHECK(Client(path).ask(ask).table == good_table());
}

void nonsense(const std::string& path) {
  const std::vector<std::function<Bytes(std::uint64_t)>> answers = {
      [](std::uint64_t) { return Bytes(64, 'H'); },
      [](std::uint64_t) { return Bytes{0, 0, 0, 0}; },
      [](std::uint64_t) { return Bytes{23, 0, 0, 0}; },
      [](std::uint64_t) { return Bytes{0xff, 0xff, 0xff, 0xff}; },
      [](std::uint64_t number) { return answer(number + 1, kBrainKeep, {}); },
      [](std::uint64_t number) { return answer(number, kBrainKeep, {1}); },
      [](std::uint64_t number) { return answer(number, kBrainTable, {}); },
      [](std::uint64_t number) { return answer(number, kBrainAsk, {}); },
      [](std::uint64_t number) { return answer(number, 99, {}); },
      [](std::uint64_t number) { return answer(number, kBrainKeep, {}, 2); },
      [](std::uint64_t number) { return answer(number, kBrainTable, Bytes(kMaxFileBytes + 1)); },
  };
  std::size_t turn = 0;  // each connection gets one good answer, then the next bad one
  const Server server(path, [&](int connection) {
    const std::uint64_t number = read_ask(connection);
    write_all(connection, answer(number, kBrainTable, good_table()));
    const std::uint64_t next = read_ask(connection);
    if (next != 0 && turn < answers.size()) write_all(connection, answers[turn++](next));
  });
  Client client(path);
  for (std::size_t i = 0; i < answers.size(); ++i) {
    CHECK(client.ask().table == good_table());
    CHECK(!client.ask().problem.empty());
  }
  CHECK(client.ask().problem.empty());
}

void slow_and_dead(const std::string& path) {
  CHECK(Client(std::string(108, 'p')).fails("its path is too long"));
  {
    const Server server(path, [](int connection) {
      const std::uint64_t number = read_ask(connection);
      pollfd closed = {connection, POLLIN, 0};
      poll(&closed, 1, 10'000);  // until the client gives up
      send(connection, &number, sizeof number, MSG_NOSIGNAL);
    });
    Client client(path, kShort);
    const std::uint64_t from_ms = monotonic_ms();
    CHECK(client.fails("does not answer in time"));
    const std::uint64_t waited_ms = monotonic_ms() - from_ms;
    CHECK(waited_ms >= kShort.answer_ms && waited_ms < kShort.answer_ms + 5'000);
  }
  {
    const Server server(path, [](int connection) { read_ask(connection); });
    Client client(path);
    CHECK(client.fails("closed the connection") && client.fails("closed the connection"));
  }
  Client client(path);
  CHECK(client.fails("nobody listens there"));  // its socket outlived it
  unlink(path.c_str());
  CHECK(client.fails("nobody listens there"));
  const Server server(path, [](int connection) {  // started at last
    write_all(connection, answer(read_ask(connection), kBrainTable, good_table()));
  });
  CHECK(client.ask().table == good_table());
}

void full_queue(const std::string& path) {
  const int listener = listen_at(path, 0);
  std::vector<int> others;
  for (int i = 0; i < 2; ++i) {
    others.push_back(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    std::strcpy(address.sun_path, path.c_str());
    CHECK(connect(others.back(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0 ||
          i > 0);
  }
  Client client(path, kShort);
  CHECK(client.fails("does not take the connection in time"));
  for (const int other : others) close(other);
  close(listener);
}

/// Who listens at it is somebody else.
void peer_that_is_not_us(const std::string& path) {
  if (geteuid() != 0) return;
  const int listener = listen_at(path);
  int ready[2];
  CHECK(pipe(ready) == 0);
  const pid_t child = fork();
  if (child == 0) {
    const bool changed = setuid(12345) == 0 && listen(listener, 4) == 0;  // notes who listens
    char byte = changed ? 'y' : 'n';
    if (write(ready[1], &byte, 1) == 1) pause();
    _exit(0);
  }
  char byte = 0;
  CHECK(read(ready[0], &byte, 1) == 1 && byte == 'y');
  CHECK(Client(path).fails("runs as another user"));
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  for (const int descriptor : {ready[0], ready[1], listener}) close(descriptor);
}

/// A new artifact comes while a brain thinks about the one before: its answer is nobody's.
void forgotten_question(const std::string& path) {
  bool is_first = true;
  const Server server(path, [&is_first](int connection) {
    const std::uint64_t number = read_ask(connection);
    if (is_first) sleep_ns(300'000'000);
    const Bytes old = answer(number, kBrainError, {'o', 'l', 'd'});
    write_all(connection, is_first ? old : answer(number, kBrainTable, good_table()));
    is_first = false;
  });
  setenv("DYNAMICCL_BRAIN_SOCKET", path.c_str(), 1);
  static auto* brains = new BrainThread;  // its thread lives as long as the process
  CHECK(brains->ask(1, {"/old", "box", 1, 8, {}, {}}));
  CHECK(!brains->ask(1, {"/old", "box", 1, 8, {}, {}}));
  sleep_ns(100'000'000);
  brains->forget(1);
  CHECK(brains->ask(1, {"/new", "box", 1, 8, {}, {}}));
  std::unique_ptr<BrainAnswer> got;
  for (int i = 0; i < 1'000 && got == nullptr; ++i) {
    sleep_ns(5'000'000);
    got = brains->take(1);
  }
  CHECK(got != nullptr && got->problem.empty() && got->table == good_table());
}

}  // namespace

int main(int, char** arguments) {
  const std::string path = std::string(arguments[1]) + "/brain.sock";
  tables_keeps_and_errors(path);
  full_history_goes_through(path);
  nonsense(path);
  slow_and_dead(path);
  full_queue(path);
  peer_that_is_not_us(path);
  forgotten_question(path);
  unlink(path.c_str());
  return g_failures;
}
