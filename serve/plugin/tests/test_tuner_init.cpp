// Who calls `init`, whom it waits for, and what it leaves in a job: each case in a process of its
// own. That it makes no thread and no handler, and writes to no descriptor, is seen in what it
// imports (tests/serve/test_plugin.py).
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <chrono>
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

Bytes table(int num_channels) {
  return table_of(1, 2, {kRing, kSimple, static_cast<std::int8_t>(num_channels), 1, 0}, kAllGather);
}

/// Of another NCCL in this process.
void* symbol_of(const std::string& name, const char* symbol) {
  const std::string path = g_build + "/lib" + name + ".so";
  return dlsym(dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL), symbol);
}
ncclDebugLogger_t logger_of(const std::string& name) {
  return reinterpret_cast<ncclDebugLogger_t>(symbol_of(name, "fake_logger"));
}

bool said(const char* why) {
  return !t_lines.empty() && t_lines.back().find(why) != std::string::npos;
}

/// Whether this library's ranks have the table, after so long.
bool has_table(const Library& library, double least_ms = 0, double most_ms = 500) {
  const auto from = std::chrono::steady_clock::now();
  const bool has = library.init(6, 2, 1) != nullptr;
  const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - from;
  CHECK(took.count() >= least_ms && took.count() < most_ms);
  return has;
}

/// A port on which nobody listens, and the environment of ranks that vote by it.
std::string use_arbiter() {
  sockaddr_in any = {};
  auto* address = reinterpret_cast<sockaddr*>(&any);
  socklen_t size = sizeof any;
  const int probe = socket(AF_INET, SOCK_STREAM, 0);
  CHECK(listen(probe, 1) == 0 && getsockname(probe, address, &size) == 0);
  close(probe);
  const std::string port = std::to_string(ntohs(any.sin_port));
  setenv("DYNAMICCL_ARBITER", ("127.0.0.1:" + port).c_str(), 1);
  setenv("DYNAMICCL_KEY", "0123456789abcdeffedcba9876543210", 1);
  setenv("DYNAMICCL_WORD", "0", 1);
  return port;
}

/// It ends with this process.
void start_arbiter(const std::string& port) {
  const std::string numbers = port + " " + std::to_string(getpid());
  CHECK(std::system((g_build + "/dynamiccl-arbiter " + numbers + " > /dev/null").c_str()) == 0);
}

/// Channels of an AllGather are asked for before NCCL 2.29 alone: the second NCCL is 2.28, the
/// program's own is 2.30, and both take one table. RCCL is left alone.
void the_nccl_that_calls_counts(const Library& library) {
  const Call call = {kAllGather};
  for (int i = 0; i < 2; ++i) {
    void* own = library.init(6, 2, 1);
    void* others = library.init(6, 2, 1, logger_of("second_nccl"));
    CHECK(own != nullptr && library.ask(6, own, call).num_channels == 0);
    CHECK(others != nullptr && library.ask(6, others, call).num_channels == 8);
  }
  CHECK(library.init(6, 2, 1, logger_of("rccl")) == nullptr);
  const std::string line = static_cast<const char*>(symbol_of("rccl", "fake_line"));
  CHECK(line.find("this is RCCL") != std::string::npos);
  CHECK(library.init(6, 2, 1, nullptr) != nullptr);
}

/// No descriptor and no word; whichever way it votes.
void nothing_is_left(const Library& library) {
  const auto count_descriptors = [] {
    const std::filesystem::directory_iterator entries("/proc/self/fd");
    return std::distance(begin(entries), end(entries));
  };
  const auto before = count_descriptors();
  for (const bool by_arbiter : {false, true}) {
    if (by_arbiter) start_arbiter(use_arbiter());
    for (int i = 0; i < 3; ++i) CHECK(has_table(library));
    setenv("DYNAMICCL_PROBLEM", "no artifact", 1);
    CHECK(!has_table(library));
    unsetenv("DYNAMICCL_PROBLEM");
    CHECK(count_descriptors() == before && words_of_job().empty());
  }
}

/// NCCL closes a tuner's library with the last communicator (2.30.7 `plugin/tuner.cc:106`). One
/// that was off has seen the parent, too.
void ids_outlive_the_library(const Library&) {
  const std::uint64_t parent = 0x123456789abcdef0;
  const auto make = [](std::uint64_t id) {
    t_lines.clear();
    return Library(g_library).init(6, 2, 1, keep_line, id) != nullptr;
  };
  setenv("DYNAMICCL_DISABLE", "1", 1);
  CHECK(!make(parent));
  unsetenv("DYNAMICCL_DISABLE");
  CHECK(make(4));
  CHECK(!make(id_of_shrunk(parent)) && said("was shrunk before"));
  CHECK(!make(5));  // whose id may be that of two
}

/// What a group waited for in vain is no reason for another one to abstain.
void waits_in_vain_are_short_and_forgiven(const Library& library) {
  setenv("DYNAMICCL_TEST_LIMIT_MS", "4000", 1);
  setenv("DYNAMICCL_PROBLEM", "no artifact", 1);
  CHECK(!has_table(library));  // nobody has waited
  unsetenv("DYNAMICCL_PROBLEM");
  const Library one(g_library, 1);
  // 10 s once a process (here 4), then 1 s, then 0.1 s.
  for (const double limit_ms : {4000.0, 400.0, 40.0, 40.0}) {
    CHECK(!has_table(one, limit_ms, limit_ms + 150));
  }
  CHECK(said("not all 2 ranks came in time"));
  CHECK(words_of_job().size() == 4);                  // for those who come late
  for (int i = 0; i < 3; ++i) library.init(6, 1, 1);  // by the ids of those above
  setenv("DYNAMICCL_TEST_LIMIT_MS", "100000", 1);     // 1 s: both ranks come, if late
  CHECK(has_table(library));
}

/// Nobody waits for an arbiter that does not listen, and later communicators find it.
void an_arbiter_that_comes_later_is_found(const Library& library) {
  const std::string port = use_arbiter();
  CHECK(!has_table(library) && said("does not listen: Connection refused"));
  start_arbiter(port);
  CHECK(has_table(library));
  unsetenv("DYNAMICCL_KEY");
  CHECK(!has_table(library) && said("DYNAMICCL_KEY is not 32 hex digits"));
  setenv("DYNAMICCL_KEY", "0123456789abcdeffedcba9876543211", 1);  // of another installation
  CHECK(!has_table(library));
}

void nobody_waits_where_no_answer_can_come(const Library& library) {
  setenv("DYNAMICCL_WORD", "0", 1);
  CHECK(!has_table(library) && said("DYNAMICCL_ARBITER is not set"));
  use_arbiter();
  for (const char* address : {"host:7000", "10.0.0.1", "10.0.0.1:0", "[::1]:70000", "::1:7000"}) {
    setenv("DYNAMICCL_ARBITER", address, 1);
    CHECK(!has_table(library) && said("not an address and a port"));
  }
  rlimit files = {};
  getrlimit(RLIMIT_NOFILE, &files);
  const rlimit none = {0, files.rlim_max};
  setrlimit(RLIMIT_NOFILE, &none);
  for (const char* address : {"127.0.0.1:7000", "[::1]:7000", ""}) {
    setenv("DYNAMICCL_ARBITER", address, 1);
    if (address[0] == '\0') setenv("DYNAMICCL_WORD", "1", 1);
    CHECK(!has_table(library) && said("Too many open files"));
  }
  setrlimit(RLIMIT_NOFILE, &files);
  signal(SIGXFSZ, SIG_IGN);
  setrlimit(RLIMIT_FSIZE, &none);
  CHECK(!has_table(library) && said("/dev/shm cannot be used: File too large"));
}

/// Somebody put a link there, to a file of the user's.
void a_link_in_place_of_a_word_is_not_followed(const Library& library) {
  const std::string file = g_artifact->path(9, 9);
  g_artifact->write(9, 9, {});
  const std::string word = "/dev/shm/dynamiccl-" + std::to_string(geteuid()) + "-" +
                           getenv("DYNAMICCL_JOB") + "-0000000000000065-1";  // its first id
  CHECK(symlink(file.c_str(), word.c_str()) == 0);
  CHECK(!has_table(library));
  CHECK(std::filesystem::file_size(file) == 0);
}

/// Its bytes are in own memory: a mapped file that is cut off is a SIGBUS.
void a_file_is_cut_off_and_replaced_in_use(const Library& library) {
  const Call call = {kAllGather};
  void* context = library.init(6, 2, 1, logger_of("second_nccl"));
  g_artifact->write(1, 2, {});
  CHECK(library.ask(6, context, call).num_channels == 8);
  g_artifact->write(1, 2, table(8));
  // On some nodes a file is replaced before it is read, on others after.
  const Library one(g_library, 1), two(g_library, 1);
  std::thread first([&] { CHECK(!has_table(one) && said("differs from the first in table")); });
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  g_artifact->write(1, 2, table(4));
  CHECK(!has_table(two));
  first.join();
  g_artifact->write(1, 2, table(8));
}

}  // namespace

int main(int, char** arguments) {
  g_library = arguments[1];
  g_build = arguments[2];
  const ArtifactDirectory artifact(g_build, "init");
  g_artifact = &artifact;
  artifact.write(1, 2, table(8));
  for (const auto run :
       {the_nccl_that_calls_counts, nothing_is_left, ids_outlive_the_library,
        waits_in_vain_are_short_and_forgiven, an_arbiter_that_comes_later_is_found,
        nobody_waits_where_no_answer_can_come, a_link_in_place_of_a_word_is_not_followed,
        a_file_is_cut_off_and_replaced_in_use}) {
    const pid_t child = fork();
    if (child == 0) {
      g_failures = 0;  // of its own
      begin_job();
      run(Library(g_library));
      sweep_job();
      std::fflush(nullptr);
      _exit(g_failures != 0 ? 1 : 0);
    }
    int status = 1;
    waitpid(child, &status, 0);
    CHECK(status == 0);
  }
  return g_failures != 0;
}
