// dynamiccl-probe: what the plugin would find on this machine, as one line of JSON.
//
//   dynamiccl-probe [--nccl LIBRARY] [ARTIFACT]
//
// It is made of the plugin's own code and needs no Python, so it can run on every rank, in the
// job's container. LIBRARY is the job's libnccl.so.2: without it the fingerprint has nccl=0.
// Exit code: 0; 2 wrong usage; 3 the artifact cannot be used; 4 the machine cannot be named.
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

#include "identity/fingerprint.h"
#include "identity/index.h"
#include "platform/dynamic.h"
#include "platform/loaded_nccl.h"
#include "trusted/file.h"
#include "vocabulary.h"

using namespace dynamiccl;

namespace {

constexpr int kUsage = 2, kBadArtifact = 3, kBadMachine = 4;

int wrong_usage() {
  std::fputs("usage: dynamiccl-probe [--nccl LIBRARY] [ARTIFACT]\n", stderr);
  return kUsage;
}

/// Prints what stands in the artifact's index. No text in it needs an escape in JSON.
int print_artifact(const char* artifact, const char* fingerprint) {
  char path[4096];
  const int length = std::snprintf(path, sizeof path, "%s/plugin.index", artifact);
  void* memory = std::malloc(sizeof(PluginIndex));
  if (memory == nullptr) {
    std::fputs("error: memory is short\n", stderr);
    return kBadMachine;
  }
  auto* index = new (memory) PluginIndex;
  const bool fits = length > 0 && static_cast<std::size_t>(length) < sizeof path;
  File directory;
  const char* problem =
      fits ? open_trusted_directory(artifact, &directory) : "its path is too long";
  if (problem == nullptr) problem = index->load(path);
  if (problem == nullptr) {
    char system[kSystemBytes] = "null";
    const char* quote = index->find_system(fingerprint, system) ? "\"" : "";
    std::printf(", \"artifact_sha256\": \"%s\", \"system\": %s%s%s", index->artifact_hash(), quote,
                system, quote);
  } else {
    std::printf(", \"artifact_problem\": \"%s\"", problem);
  }
  std::free(memory);
  return problem == nullptr ? 0 : kBadArtifact;
}

}  // namespace

int main(int count, char** arguments) {
  int next = 1;
  if (next < count && std::strcmp(arguments[next], "--nccl") == 0) {
    if (next + 1 >= count) return wrong_usage();
    if (open_library(arguments[next + 1]) == nullptr) {
      std::fprintf(stderr, "error: cannot load %s: %s\n", arguments[next + 1], library_error());
      return kBadMachine;
    }
    next += 2;
  }
  if (next + 1 < count || (next < count && arguments[next][0] == '-')) return wrong_usage();
  char fingerprint[kFingerprintBytes];
  if (!take_fingerprint(loaded_nccl_version(), fingerprint)) {
    std::fputs("error: a GPU or NIC of this machine cannot be read in /proc or /sys\n", stderr);
    return kBadMachine;
  }
  std::printf("{\"plugin_version\": \"%s\", \"fingerprint\": \"%s\"", kPluginVersion, fingerprint);
  const int code = next < count ? print_artifact(arguments[next], fingerprint) : 0;
  std::puts("}");
  return code;
}
