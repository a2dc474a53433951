// Which communicators mode adaptive makes no context for, though the artifact has their table.
#include <dlfcn.h>

#include <cstdarg>
#include <cstring>
#include <string>

#include "adaptive/context.h"
#include "identity/ids.h"
#include "profiler/profiler.h"
#include "tests/adaptive_artifact.h"
#include "tests/check.h"

using namespace dynamiccl;

namespace {

int g_version = 23007;
std::string g_build;
std::string g_line;

void keep_line(ncclDebugLogLevel, unsigned long, const char*, int, const char* format, ...) {
  char line[1024];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);
  g_line = line;
}

/// Rank 0 of 8, which nobody else will join; whether it has a context.
bool acts(std::uint64_t comm_id, ncclDebugLogger_t logger = keep_line) {
  static int mask = 0;
  g_line = "";
  Profiler* profiler = Profiler::create({comm_id, 0, 8, 1, &mask, nullptr, true});
  Context* context = Context::create({8, 1, logger, nullptr, comm_id});
  Context::retire(context);
  if (profiler != nullptr) profiler->finalize();
  return context != nullptr;
}

bool abstains(std::uint64_t comm_id, const char* why) {
  return !acts(comm_id) && g_line.find(why) != std::string::npos;
}

void releases() {
  for (const int version : {22800, 22907, 23099}) {
    g_version = version;
    CHECK(acts(static_cast<std::uint64_t>(version)));
  }
  for (const int version : {0, 23100, 23203}) {
    g_version = version;
    CHECK(abstains(static_cast<std::uint64_t>(version), "another release of NCCL"));
  }
  g_version = 23007;
}

void rccl() {
  void* handle = dlopen((g_build + "/librccl.so").c_str(), RTLD_NOW | RTLD_LOCAL);
  CHECK(!acts(5, reinterpret_cast<ncclDebugLogger_t>(dlsym(handle, "fake_logger"))));
  CHECK(std::strstr(static_cast<const char*>(dlsym(handle, "fake_line")), "this is RCCL"));
}

void one_id_for_all() {
  setenv("NCCL_COMM_ID", "127.0.0.1:1", 1);
  CHECK(abstains(6, "NCCL_COMM_ID is set"));
  unsetenv("NCCL_COMM_ID");
  CHECK(acts(6));
}

/// The last one: nothing that this process makes later acts. Who was off has seen the parent, too.
void shrinks() {
  const std::uint64_t parent = 0x123456789abcdef0;
  setenv("DYNAMICCL_DISABLE", "1", 1);
  CHECK(abstains(parent, "DYNAMICCL_DISABLE is 1"));
  unsetenv("DYNAMICCL_DISABLE");
  CHECK(acts(7));
  CHECK(abstains(id_of_shrunk(parent), "a communicator was shrunk before"));
  CHECK(abstains(8, "a communicator was shrunk before"));
}

}  // namespace

/// The NCCL that a tuner finds in this process (ENABLE_EXPORTS).
extern "C" __attribute__((visibility("default"))) int ncclGetVersion(int* version) {
  *version = g_version;
  return 0;
}

int main(int, char** arguments) {
  g_build = arguments[2];
  const AdaptiveArtifact artifact(g_build, "creation", table_of(1, 8, {kRing, kLL128, 8, 1, 0}));
  releases();
  rccl();
  one_id_for_all();
  shrinks();
  return g_failures;
}
