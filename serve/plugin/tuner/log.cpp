// See log.h.
#include "tuner/log.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "identity/environment.h"
#include "platform/threads.h"

namespace dynamiccl {
namespace {

constexpr std::size_t kPendingBytes = 256 * 1024;
constexpr std::size_t kLineBytes = 4 * 1024;

Mutex g_mutex;
char* g_pending = nullptr;  // null: nobody writes
std::size_t g_size = 0;
char g_path[4096];
int g_pipe[2] = {-1, -1};
bool g_has_spoken = false;

/// Text as a JSON string without its quotes; lines become "; ".
void escape(const char* text, char* out, std::size_t capacity) noexcept {
  std::size_t at = 0;
  for (; *text != '\0' && at + 3 < capacity; ++text) {
    const char character = *text;
    if (character == '\n') {
      if (text[1] == '\0') break;
      out[at++] = ';';
      out[at++] = ' ';
    } else if (character == '"' || character == '\\') {
      out[at++] = '\\';
      out[at++] = character;
    } else {
      out[at++] = character >= ' ' && character <= '~' ? character : '?';
    }
  }
  out[at] = '\0';
}

void write_pending(char* copy) noexcept {
  std::size_t size = 0;
  {
    const Lock lock(&g_mutex);
    size = g_size;
    std::memcpy(copy, g_pending, size);
    g_size = 0;
  }
  const int file = open(g_path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0644);
  if (file < 0) return;
  // A log that cannot be written is no reason for anything.
  [[maybe_unused]] const ssize_t written = write(file, copy, size);
  close(file);
}

void* run(void*) {
  auto* copy = static_cast<char*>(std::malloc(kPendingBytes));
  char byte;
  while (copy != nullptr && read(g_pipe[0], &byte, 1) == 1) write_pending(copy);
  std::free(copy);
  return nullptr;
}

}  // namespace

void start_log() noexcept {
  const char* folder = value_of("DYNAMICCL_LOG_DIR");
  const Lock lock(&g_mutex);
  if (folder == nullptr || g_pending != nullptr || pipe2(g_pipe, O_CLOEXEC) != 0) return;
  char host[64] = "";
  gethostname(host, sizeof host - 1);
  std::snprintf(g_path, sizeof g_path, "%s/dynamiccl-%s-%d.jsonl", folder, host,
                static_cast<int>(getpid()));
  pthread_t thread;
  g_pending = static_cast<char*>(std::malloc(kPendingBytes));
  if (g_pending != nullptr && start_thread(run, nullptr, "dynamiccl-log", &thread)) {
    fcntl(g_pipe[1], F_SETFL, O_NONBLOCK);
    detach_thread(thread);
  }
}

void log_decision(const Coordinator::Decided& decided) noexcept {
  char identity[2 * kMaxIdentityBytes], reason[2 * kMaxReasonBytes], line[kLineBytes];
  escape(decided.identity, identity, sizeof identity);
  escape(decided.reason, reason, sizeof reason);
  const char* choice = decided.is_table ? "table" : "abstain";
  const int length = std::snprintf(
      line, sizeof line,
      "{\"time\": %llu.%03llu, \"communicator\": \"%016llx\", \"ranks\": %u, \"votes\": %u, "
      "\"decision\": \"%s\", \"reason\": \"%s\", \"took_ms\": %llu, \"identity\": \"%s\"}\n",
      static_cast<unsigned long long>(realtime_ns() / 1'000'000'000),
      static_cast<unsigned long long>(realtime_ns() / 1'000'000 % 1'000),
      static_cast<unsigned long long>(decided.comm_id), decided.num_ranks, decided.num_votes,
      choice, reason, static_cast<unsigned long long>(decided.took_ms), identity);
  const Lock lock(&g_mutex);
  if (!g_has_spoken) {
    g_has_spoken = true;
    std::fprintf(stderr, "DynamICCL: first communicator, %u ranks: %s%s%s\n", decided.num_ranks,
                 decided.is_table ? "the artifact's table, from call 0" : "NCCL's own choice",
                 decided.is_table ? "" : ": ", decided.reason);
  }
  const auto size = static_cast<std::size_t>(length);
  if (g_pending == nullptr || length < 0 || g_size + size > kPendingBytes) return;
  std::memcpy(g_pending + g_size, line, size < sizeof line ? size : sizeof line - 1);
  g_size += size < sizeof line ? size : sizeof line - 1;
  [[maybe_unused]] const ssize_t told = write(g_pipe[1], "", 1);
}

}  // namespace dynamiccl
