// A brain process that is slow, dead, strange or somebody else's costs time and nothing more.
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <string>
#include <thread>

#include "brain/socket_brain.h"
#include "file.h"
#include "platform/threads.h"
#include "tests/check.h"
#include "tests/table_file.h"

using namespace dynamiccl;

namespace {

constexpr std::uint64_t kMs = 1'000'000;
constexpr SocketLimits kShort = {200 * kMs, 300 * kMs};
constexpr SocketLimits kLong = {5'000 * kMs, 20'000 * kMs};  // under sanitizers, on a busy machine

int listen_at(const std::string& path, mode_t mode = 0600, int backlog = 4) {
  unlink(path.c_str());
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::strcpy(address.sun_path, path.c_str());
  const int descriptor = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  CHECK(bind(descriptor, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
  CHECK(chmod(path.c_str(), mode) == 0);
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
  bytes.insert(bytes.end(), kBrainMagic, kBrainMagic + 8);
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

struct Asked {
  bool done;
  Bytes table;
  std::string reason;
};

class Client {
 public:
  explicit Client(const std::string& path, const SocketLimits& limits = kLong) : brain_(limits) {
    const dynamiccl_brain_config config = {"/artifact", "box", path.c_str(), 1, 8};
    char reason[DYNAMICCL_REASON_BYTES] = "";
    CHECK(brain_.open(config, reason, sizeof reason));
  }

  Asked ask(const dynamiccl_history& history = {}) {
    Asked asked = {false, Bytes(DYNAMICCL_TABLE_BYTES), ""};
    char reason[DYNAMICCL_REASON_BYTES] = "";
    std::size_t bytes = 1;
    asked.done = brain_.decide(history, asked.table.data(), asked.table.size(), &bytes, reason,
                               sizeof reason);
    asked.table.resize(bytes);
    asked.reason = reason;
    CHECK(asked.done || (bytes == 0 && !asked.reason.empty()));
    return asked;
  }

  /// Whether it fails with `why`.
  bool fails(const char* why) {
    const Asked asked = ask();
    if (!asked.done && asked.reason.find(why) != std::string::npos) return true;
    std::fprintf(stderr, "said: %s\n", asked.done ? "-" : asked.reason.c_str());
    return false;
  }

 private:
  SocketBrain brain_;
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
    write_all(connection, answer(read_ask(connection), kBrainError, Bytes(9000, 'x')));
    write_all(connection, answer(read_ask(connection), kBrainError, {}));
    for (const std::uint8_t byte : answer(read_ask(connection), kBrainTable, good_table())) {
      write_all(connection, {byte});
    }
  });
  Client client(path);
  const Asked table = client.ask();
  CHECK(table.done && table.table == good_table());
  const Asked kept = client.ask();
  CHECK(kept.done && kept.table.empty());
  CHECK(client.ask().reason == "brain at " + path + ": no???");
  CHECK(client.ask().reason.size() == DYNAMICCL_REASON_BYTES - 1);
  CHECK(!client.ask({}).done);
  CHECK(client.ask().table == good_table());
}

void full_history_goes_through(const std::string& path) {
  const Server server(path, serve_tables);
  Client client(path);
  std::vector<dynamiccl_task> tasks(kMaxTasks);
  for (std::size_t i = 0; i < tasks.size(); ++i) {
    dynamiccl_task& task = tasks[i];
    task = {static_cast<int>(i) / kMaxBins,
            static_cast<int>(i) % kMaxBins,
            DYNAMICCL_WINDOW,
            DYNAMICCL_WINDOW,
            {}};
    for (dynamiccl_call& call : task.calls) call = {1 << 20, 50.0, -1.0, -1.0, kRing, kLL, 8};
  }
  const Bytes table = good_table();
  dynamiccl_history history = {tasks.data(), static_cast<int>(tasks.size()), table.data(),
                               table.size()};
  CHECK(client.ask(history).table == good_table());
  history.num_tasks = static_cast<int>(kMaxTasks) + 1;
  CHECK(client.ask(history).reason == "the history is impossible");
  history.num_tasks = 1;
  for (const auto& spoil : std::vector<std::function<void(dynamiccl_task*)>>{
           [](dynamiccl_task* task) { task->num_calls = 9; },
           [](dynamiccl_task* task) { task->num_calls = -1; },
           [](dynamiccl_task* task) { task->collective = 5; },
           [](dynamiccl_task* task) { task->bin = -1; },
           [](dynamiccl_task* task) { task->bin = kMaxBins; },
           [](dynamiccl_task* task) { task->calls[7].time_us = 0.0 / 0.0; }}) {
    const dynamiccl_task before = tasks[0];
    spoil(&tasks[0]);
    CHECK(client.ask(history).reason == "the history is impossible");
    tasks[0] = before;
  }
  history.table_bytes = kMaxFileBytes + 1;
  CHECK(client.ask(history).reason == "the history is impossible");
  history.table_bytes = table.size();
  CHECK(client.ask(history).done);
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
    CHECK(!client.ask().done);
  }
  CHECK(client.ask().done);
}

void slow_and_dead(const std::string& path) {
  {
    const Server server(path, [](int connection) {
      const std::uint64_t number = read_ask(connection);
      pollfd closed = {connection, POLLIN, 0};
      poll(&closed, 1, 10'000);  // until the client gives up
      send(connection, &number, sizeof number, MSG_NOSIGNAL);
    });
    Client client(path, kShort);
    const std::uint64_t start_ns = monotonic_ns();
    CHECK(client.fails("does not answer in time"));
    const std::uint64_t waited_ns = monotonic_ns() - start_ns;
    CHECK(waited_ns >= kShort.answer_ns && waited_ns < kShort.answer_ns + 5'000 * kMs);
  }
  {
    const Server server(path, [](int connection) { read_ask(connection); });
    Client client(path);
    CHECK(client.fails("closed the connection") && client.fails("closed the connection"));
  }
  Client client(path);
  CHECK(client.fails("nobody listens there"));  // its socket outlived it
  unlink(path.c_str());
  CHECK(client.fails("there is no such file"));
  const Server server(path, [](int connection) {  // started at last
    write_all(connection, answer(read_ask(connection), kBrainTable, good_table()));
  });
  CHECK(client.ask().table == good_table());
}

void full_queue(const std::string& path) {
  const int listener = listen_at(path, 0600, 0);
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

void sockets_that_are_not_ours(const std::string& path) {
  for (const mode_t mode : {0666, 0660, 0606, 0602}) {
    const int listener = listen_at(path, mode);
    CHECK(Client(path).fails("others may write to it"));
    close(listener);
  }
  const int listener = listen_at(path);
  const std::string link = path + ".link";
  unlink(link.c_str());
  CHECK(symlink(path.c_str(), link.c_str()) == 0);
  CHECK(Client(link).fails("symbolic link"));
  unlink(link.c_str());
  CHECK(Client("/dev/null").fails("not a socket"));
  if (geteuid() == 0) {
    CHECK(chown(path.c_str(), 12345, 12345) == 0);
    CHECK(Client(path).fails("it belongs to another user"));
  }
  close(listener);
}

/// The socket looks right, but who listens at it is somebody else.
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

void configs_that_do_not_fit(const std::string& path) {
  const std::string long_path(108, 'p'), long_artifact(kMaxArtifactBytes, 'a');
  const dynamiccl_brain_config bad[] = {{"/a", "box", long_path.c_str(), 1, 8},
                                        {long_artifact.c_str(), "box", path.c_str(), 1, 8},
                                        {"/a", nullptr, path.c_str(), 1, 8}};
  for (const dynamiccl_brain_config& config : bad) {
    char reason[DYNAMICCL_REASON_BYTES] = "";
    void* brain = nullptr;
    CHECK(socket_brain()->open(&config, &brain, reason, sizeof reason) != 0 && reason[0] != '\0');
  }
}

}  // namespace

int main(int, char** arguments) {
  const std::string path = std::string(arguments[2]) + "/brain.sock";
  tables_keeps_and_errors(path);
  full_history_goes_through(path);
  nonsense(path);
  slow_and_dead(path);
  full_queue(path);
  sockets_that_are_not_ours(path);
  peer_that_is_not_us(path);
  configs_that_do_not_fit(path);
  unlink(path.c_str());
  return g_failures;
}
