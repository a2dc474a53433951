// Who calls `init`, whom it waits for, and what it leaves in a job: each case in a process of its
// own.
#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <netinet/in.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <chrono>
#include <cstddef>
#include <cstring>
#include <iterator>

#include "identity/ids.h"
#include "tests/check.h"
#include "tests/library.h"
#include "tests/table_file.h"

using namespace dynamiccl;

namespace {

const char* g_library = nullptr;
std::string g_build;
const ArtifactDirectory* g_artifact = nullptr;

const Bytes kTable = table_of(1, 2, {kRing, kSimple, 8, 1, 0}, kAllGather);
const Bytes kOtherTable = table_of(1, 2, {kRing, kSimple, 4, 1, 0}, kAllGather);
constexpr char kKey[] = "0123456789abcdeffedcba9876543210";

struct OtherNccl {
  explicit OtherNccl(const std::string& name)
      : handle(dlopen((g_build + "/lib" + name + ".so").c_str(), RTLD_NOW | RTLD_LOCAL)),
        logger(reinterpret_cast<ncclDebugLogger_t>(dlsym(handle, "fake_logger"))),
        line(static_cast<const char*>(dlsym(handle, "fake_line"))) {}
  void* handle;
  ncclDebugLogger_t logger;
  const char* line;  // of this thread
};

/// How long `init` of this library's ranks took; the first one's context.
double took_ms(const Library& library, void** context) {
  const auto from = std::chrono::steady_clock::now();
  *context = library.init(6, 2, 1);
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - from).count();
}

/// A port on which nobody listens, and the environment of ranks that vote by it.
int use_arbiter() {
  sockaddr_in any = {};
  any.sin_family = AF_INET;
  any.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof any;
  const int probe = socket(AF_INET, SOCK_STREAM, 0);
  if (bind(probe, reinterpret_cast<sockaddr*>(&any), size) != 0) std::abort();
  getsockname(probe, reinterpret_cast<sockaddr*>(&any), &size);
  close(probe);
  const int port = ntohs(any.sin_port);
  setenv("DYNAMICCL_ARBITER", ("127.0.0.1:" + std::to_string(port)).c_str(), 1);
  setenv("DYNAMICCL_KEY", kKey, 1);
  setenv("DYNAMICCL_WORD", "0", 1);
  return port;
}

/// It ends with this process.
void start_arbiter(int port) {
  const std::string program = g_build + "/dynamiccl-arbiter";
  const pid_t child = fork();
  if (child == 0) {
    dup2(open("/dev/null", O_WRONLY), 1);  // it prints its port
    execl(program.c_str(), program.c_str(), std::to_string(port).c_str(),
          static_cast<char*>(nullptr));
    _exit(127);
  }
  int status = 1;
  waitpid(child, &status, 0);
  CHECK(status == 0);
}

std::size_t count_in(const char* directory) {
  const std::filesystem::directory_iterator entries(directory);
  return static_cast<std::size_t>(std::distance(begin(entries), end(entries)));
}

/// Channels of an AllGather are asked for before NCCL 2.29 alone: the second NCCL is 2.28, the
/// program's own is 2.30, and both take one table.
void the_nccl_that_calls_counts(const Library& library) {
  const OtherNccl other("second_nccl");
  Call call;
  call.collective = kAllGather;
  for (int i = 0; i < 2; ++i) {
    void* own = library.init(6, 2, 1);
    void* others = library.init(6, 2, 1, other.logger);
    CHECK(own != nullptr && others != nullptr);
    CHECK(library.ask(6, own, call).num_channels == 0);
    CHECK(library.ask(6, others, call).num_channels == 8);
  }
}

void rccl_is_named(const Library& library) {
  const OtherNccl rccl("rccl");
  CHECK(library.init(6, 2, 1, rccl.logger) == nullptr);
  CHECK(std::strstr(rccl.line, "this is RCCL") != nullptr);
}

/// Threads of this process; a joined one is among the kernel's files for a moment more.
std::size_t count_threads() {
  for (std::size_t count = 0;;) {
    const std::size_t before = count;
    count = count_in("/proc/self/task");
    if (count == before) return count;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

/// No thread, no descriptor, no word, no handler of signals, forks or exits; whichever way it
/// votes.
void nothing_is_left(const Library& library) {
  library.init(6, 1, 1);      // what the first use of the C library leaves
  std::thread([] {}).join();  // with which a sanitizer starts one of its own
  const auto look = [&library](bool has_table) {
    const std::size_t threads = count_threads(), files = count_in("/proc/self/fd");
    struct sigaction before[NSIG] = {}, after = {};
    for (int i = 1; i < NSIG; ++i) sigaction(i, nullptr, &before[i]);
    for (int i = 0; i < 3; ++i) CHECK((library.init(6, 2, 1) != nullptr) == has_table);
    CHECK(count_threads() == threads);
    CHECK(count_in("/proc/self/fd") == files);
    for (int i = 1; i < NSIG; ++i) {
      CHECK(sigaction(i, nullptr, &after) != 0 || after.sa_handler == before[i].sa_handler);
    }
    CHECK(words_of_job().empty());
  };
  look(true);
  setenv("DYNAMICCL_PROBLEM", "no artifact", 1);
  look(false);
  unsetenv("DYNAMICCL_PROBLEM");
  start_arbiter(use_arbiter());
  look(true);
  setenv("DYNAMICCL_PROBLEM", "no artifact", 1);
  look(false);
}

/// NCCL closes a tuner's library with the last communicator (2.30.7 `plugin/tuner.cc:106`). One
/// that was off has seen the parent, too.
void ids_outlive_the_library() {
  const std::uint64_t parent = 0x123456789abcdef0;
  const auto make = [](std::uint64_t id) {
    void* handle = dlopen(g_library, RTLD_NOW | RTLD_LOCAL);
    const auto* tuner = static_cast<const ncclTuner_v6_t*>(dlsym(handle, "ncclTunerPlugin_v6"));
    void* contexts[2] = {};
    const auto rank = [&](int i) {
      CHECK(tuner->init(&contexts[i], id, 2, 1, keep_line, nullptr, nullptr) == ncclSuccess);
    };
    std::thread other(rank, 1);
    t_lines.clear();
    rank(0);
    other.join();
    dlclose(handle);
    return contexts[0] != nullptr;
  };
  setenv("DYNAMICCL_DISABLE", "1", 1);
  CHECK(!make(parent));
  unsetenv("DYNAMICCL_DISABLE");
  CHECK(make(4));
  CHECK(!make(id_of_shrunk(parent)));
  CHECK(t_lines.size() == 1 && t_lines[0].find("was shrunk before") != std::string::npos);
  CHECK(!make(5));  // whose id may be that of two
}

/// Descriptor 2 of a process that has closed it is a file of the user's.
void nothing_is_written_to_descriptor_2(const Library& library) {
  const std::string name = g_build + "/artifact-init/users-file";
  close(2);
  CHECK(open(name.c_str(), O_RDWR | O_CREAT | O_TRUNC, 0600) == 2);
  CHECK(library.init(6, 2, 1, nullptr) != nullptr);
  setenv("DYNAMICCL_PROBLEM", "no artifact", 1);
  CHECK(library.init(6, 2, 1) == nullptr);
  struct stat own = {}, named = {};
  CHECK(fstat(2, &own) == 0 && stat(name.c_str(), &named) == 0);
  CHECK(own.st_ino == named.st_ino && own.st_size == 0);
}

/// 10 s once a process (here 4), then 1 s, then 0.1 s; and what a group waited for in vain is no
/// reason for another one to abstain.
void waits_in_vain_are_short_and_forgiven(const Library& library) {
  setenv("DYNAMICCL_TEST_LIMIT_MS", "4000", 1);
  setenv("DYNAMICCL_PROBLEM", "no artifact", 1);
  CHECK(library.init(6, 2, 1) == nullptr);  // nobody has waited
  unsetenv("DYNAMICCL_PROBLEM");
  const Library alone(g_library, 1);
  void* context = nullptr;
  for (const double limit_ms : {4000.0, 400.0, 40.0, 40.0}) {
    const double ms = took_ms(alone, &context);
    CHECK(context == nullptr && ms >= limit_ms && ms < limit_ms + 150);
    CHECK(t_lines.back().find("not all 2 ranks came in time") != std::string::npos);
  }
  CHECK(words_of_job().size() == 4);                  // for those who come late
  for (int i = 0; i < 3; ++i) library.init(6, 1, 1);  // by the ids of those above
  CHECK(took_ms(library, &context) < 200 && context != nullptr);
}

/// Nobody waits for an arbiter that does not listen, and later communicators find it.
void an_arbiter_that_comes_later_is_found(const Library& library) {
  const int port = use_arbiter();
  void* context = nullptr;
  CHECK(took_ms(library, &context) < 500 && context == nullptr);
  CHECK(t_lines.back().find("does not listen: Connection refused") != std::string::npos);
  start_arbiter(port);
  CHECK(took_ms(library, &context) < 500 && context != nullptr);
  unsetenv("DYNAMICCL_KEY");
  CHECK(library.init(6, 2, 1) == nullptr);
  CHECK(t_lines.back().find("DYNAMICCL_KEY is not 32 hex digits") != std::string::npos);
  setenv("DYNAMICCL_KEY", "0123456789abcdeffedcba9876543211", 1);  // of another installation
  CHECK(library.init(6, 2, 1) == nullptr);
}

/// A seccomp profile, as a container may have one.
void forbid_sockets() {
  sock_filter rules[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_socket, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program = {std::size(rules), rules};
  CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
  CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
}

void nobody_waits_where_no_answer_can_come(const Library& library) {
  void* context = nullptr;
  setenv("DYNAMICCL_WORD", "0", 1);
  CHECK(took_ms(library, &context) < 500 && context == nullptr);
  CHECK(t_lines.back().find("DYNAMICCL_ARBITER is not set") != std::string::npos);
  use_arbiter();
  for (const char* address : {"host:7000", "10.0.0.1", "10.0.0.1:0", "[::1]:70000", "::1:7000"}) {
    setenv("DYNAMICCL_ARBITER", address, 1);
    CHECK(took_ms(library, &context) < 500 && context == nullptr);
    CHECK(t_lines.back().find("not an address and a port") != std::string::npos);
  }
  for (const char* address : {"127.0.0.1:7000", "[::1]:7000"}) {
    setenv("DYNAMICCL_ARBITER", address, 1);
    const pid_t child = fork();
    if (child == 0) {
      forbid_sockets();
      CHECK(took_ms(library, &context) < 500 && context == nullptr);
      CHECK(t_lines.back().find("does not listen: Operation not permitted") != std::string::npos);
      _exit(g_failures);
    }
    int status = 1;
    waitpid(child, &status, 0);
    CHECK(status == 0);
  }
  rlimit files = {};
  getrlimit(RLIMIT_NOFILE, &files);
  const rlimit none = {0, files.rlim_max};
  setrlimit(RLIMIT_NOFILE, &none);
  CHECK(took_ms(library, &context) < 500 && context == nullptr);
  CHECK(t_lines.back().find("Too many open files") != std::string::npos);
  setenv("DYNAMICCL_WORD", "1", 1);
  CHECK(took_ms(library, &context) < 500 && context == nullptr);
  setrlimit(RLIMIT_NOFILE, &files);
  signal(SIGXFSZ, SIG_IGN);
  setrlimit(RLIMIT_FSIZE, &none);
  CHECK(took_ms(library, &context) < 500 && context == nullptr);
  CHECK(t_lines.back().find("/dev/shm cannot be used: File too large") != std::string::npos);
}

/// Somebody put a link there, to a file of the user's.
void a_link_in_place_of_a_word_is_not_followed(const Library& library) {
  const std::string file = g_build + "/artifact-init/users-file";
  close(open(file.c_str(), O_RDWR | O_CREAT | O_TRUNC, 0600));
  const std::string word = "/dev/shm/dynamiccl-" + std::to_string(geteuid()) + "-" +
                           getenv("DYNAMICCL_JOB") + "-0000000000000065-1";  // its first id
  CHECK(symlink(file.c_str(), word.c_str()) == 0);
  CHECK(library.init(6, 2, 1) == nullptr);
  CHECK(std::filesystem::file_size(file) == 0);
}

/// Its bytes are in own memory: a mapped file that is cut off is a SIGBUS.
void a_file_is_cut_off_and_replaced_in_use(const Library& library) {
  const OtherNccl other("second_nccl");
  Call call;
  call.collective = kAllGather;
  void* context = library.init(6, 2, 1, other.logger);
  const std::string path = g_artifact->path(1, 2);
  CHECK(truncate(path.c_str(), 0) == 0);
  CHECK(library.ask(6, context, call).num_channels == 8);
  g_artifact->write(1, 2, kTable);
  // On some nodes a file is replaced before it is read, on others after.
  const Library one(g_library, 1), two(g_library, 1);
  std::thread first([&] {
    CHECK(one.init(6, 2, 1) == nullptr);
    CHECK(t_lines.back().find("differs from the first in table") != std::string::npos);
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  g_artifact->write(1, 2, kOtherTable);
  CHECK(two.init(6, 2, 1) == nullptr);
  first.join();
  g_artifact->write(1, 2, kTable);
}

template <typename Case>
void in_child(const Case& run) {
  const pid_t child = fork();
  if (child == 0) {
    g_failures = 0;  // of its own
    begin_job();
    run();
    sweep_job();
    std::fflush(nullptr);
    _exit(g_failures != 0 ? 1 : 0);
  }
  int status = 1;
  waitpid(child, &status, 0);
  CHECK(status == 0);
}

void apart(void (*run)(const Library&)) {
  in_child([run] {
    const Library library(g_library);
    run(library);
  });
}

}  // namespace

int main(int, char** arguments) {
  g_library = arguments[1];
  g_build = arguments[2];
  const ArtifactDirectory artifact(g_build, "init");
  g_artifact = &artifact;
  artifact.write(1, 2, kTable);
  apart(the_nccl_that_calls_counts);
  apart(rccl_is_named);
  apart(nothing_is_left);
  in_child(ids_outlive_the_library);
  apart(nothing_is_written_to_descriptor_2);
  apart(waits_in_vain_are_short_and_forgiven);
  apart(an_arbiter_that_comes_later_is_found);
  apart(nobody_waits_where_no_answer_can_come);
  apart(a_link_in_place_of_a_word_is_not_followed);
  apart(a_file_is_cut_off_and_replaced_in_use);
  return g_failures;
}
