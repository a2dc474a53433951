// Who calls `init`, and whom it waits for: each case in a process of its own, since a process knows
// one job.
#include <arpa/inet.h>
#include <dlfcn.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>

#include "tests/check.h"
#include "tests/library.h"
#include "tests/table_file.h"

using namespace dynamiccl;

namespace {

std::string g_build;

/// What a thread of the job forks while the plugin makes its listening socket.
struct ChildMeanwhile {
  void fork_now() {
    thread = std::thread([this] {
      pid = fork();
      if (pid == 0) {
        // It would be the parent's own socket, which listens by then.
        std::this_thread::sleep_for(std::chrono::milliseconds(500));
        int num_listening = 0;
        for (int descriptor = 3; descriptor < 256; ++descriptor) {
          int listens = 0;
          socklen_t size = sizeof listens;
          getsockopt(descriptor, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size);
          num_listening += listens;
        }
        _exit(num_listening);
      }
      has_forked = true;
    });
    // Where the plugin holds forks back, that is for as long as it waits here.
    for (int i = 0; i < 20 && !has_forked; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  }

  bool is_wanted = false;
  std::thread thread;
  std::atomic<pid_t> pid{-1};
  std::atomic<bool> has_forked{false};
};
ChildMeanwhile g_child;

struct OtherNccl {
  explicit OtherNccl(const std::string& name)
      : handle(dlopen((g_build + "/lib" + name + ".so").c_str(), RTLD_NOW | RTLD_LOCAL)),
        logger(reinterpret_cast<ncclDebugLogger_t>(dlsym(handle, "fake_logger"))),
        line(static_cast<const char*>(dlsym(handle, "fake_line"))) {}
  void* handle;
  ncclDebugLogger_t logger;
  const char* line;  // of this thread
};

/// Channels of an AllGather are asked for before NCCL 2.29 alone: the second NCCL is 2.28, the
/// program's own is 2.30, and both take one table.
void the_nccl_that_calls_counts(const Library& library) {
  const OtherNccl other("second_nccl");
  Call call;
  call.collective = kAllGather;
  for (int i = 0; i < 2; ++i) {
    void* own = library.init(6, 2, 1);
    void* others = library.init(6, 2, 1, nullptr, other.logger);
    CHECK(own != nullptr && others != nullptr);
    CHECK(library.ask(6, own, call).num_channels == 0);
    CHECK(library.ask(6, others, call).num_channels == 8);
  }
}

void rccl_is_named(const Library& library) {
  const OtherNccl rccl("rccl");
  CHECK(library.init(6, 2, 1, nullptr, rccl.logger) == nullptr);
  CHECK(std::strstr(rccl.line, "this is RCCL") != nullptr);
}

/// The first communicators have no rank on the coordinator's host, or before it is there: what they
/// waited for in vain is no reason to ask no more.
void a_coordinator_that_comes_later_is_found(const Library& library) {
  setenv("DYNAMICCL_TEST_LIMIT_MS", "500", 1);
  ArtifactDirectory(g_build, "later").use_coordinator();
  setenv("DYNAMICCL_ARTIFACT", (g_build + "/artifact-init").c_str(), 1);
  const std::string where = std::getenv("DYNAMICCL_COORDINATOR");
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<in_port_t>(std::stoi(where.substr(where.find(':') + 1))));
  const int taken = socket(AF_INET, SOCK_STREAM, 0);
  CHECK(bind(taken, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
  for (int i = 0; i < 5; ++i) CHECK(library.init(6, 2, 1) == nullptr);
  close(taken);
  CHECK(library.init(6, 2, 1) != nullptr);
}

void a_child_forked_meanwhile_keeps_no_socket(const Library& library) {
  ArtifactDirectory(g_build, "forked").use_coordinator();
  setenv("DYNAMICCL_ARTIFACT", (g_build + "/artifact-init").c_str(), 1);
  g_child.is_wanted = true;
  CHECK(library.init(6, 2, 1) != nullptr);
  CHECK(g_child.thread.joinable());
  g_child.thread.join();
  int status = 1;
  CHECK(waitpid(g_child.pid, &status, 0) > 0 && status == 0);
}

template <typename Case>
void apart(const char* path, const Case& run) {
  const pid_t child = fork();
  if (child == 0) {
    const Library library(path);
    run(library);
    std::fflush(nullptr);
    _exit(g_failures != 0 ? 1 : 0);
  }
  int status = 1;
  waitpid(child, &status, 0);
  CHECK(status == 0);
}

}  // namespace

/// In place of the C library's, for the plugin too.
extern "C" __attribute__((visibility("default"))) int listen(int descriptor, int backlog) noexcept {
  if (g_child.is_wanted) {
    g_child.is_wanted = false;
    g_child.fork_now();
  }
  using Listen = int (*)(int, int);
  static const auto real = reinterpret_cast<Listen>(dlsym(RTLD_NEXT, "listen"));
  return real(descriptor, backlog);
}

int main(int, char** arguments) {
  g_build = arguments[2];
  const ArtifactDirectory artifact(g_build, "init");
  artifact.write(1, 2, table_of(1, 2, {kRing, kSimple, 8, 1, 0}, kAllGather));
  apart(arguments[1], the_nccl_that_calls_counts);
  apart(arguments[1], rccl_is_named);
  apart(arguments[1], a_coordinator_that_comes_later_is_found);
  apart(arguments[1], a_child_forked_meanwhile_keeps_no_socket);
  return g_failures;
}
