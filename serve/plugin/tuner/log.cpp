// Implementation of log.h. Lines go through a pipe in packet mode, whole and in order; lines that
// do not fit into the pipe's buffer are dropped.
#include "tuner/log.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cinttypes>
#include <cstdarg>
#include <cstdio>
#include <utility>

#include "identity/environment.h"
#include "platform/threads.h"

namespace dynamiccl {
namespace {

constexpr std::size_t kLineBytes = 4 * 1024;  // PIPE_BUF of Linux: written whole, or not at all

constexpr int kWaitingBytes = 1024 * 1024;  // a page for each line

char g_path[4096] = "";  // empty: no file
int g_pipe[2] = {-1, -1};
std::atomic<int> g_num_waiting{0};

/// Text as a JSON string without its quotes; line breaks become "; ".
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

void* run(void*) {
  char line[kLineBytes];
  for (ssize_t size; (size = read(g_pipe[0], line, sizeof line)) > 0; g_num_waiting.fetch_sub(1)) {
    const bool is_json = line[0] == '{';
    const int flags = O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;
    const int file = is_json ? open(g_path, flags, 0644) : STDERR_FILENO;
    pollfd is_free = {file, POLLOUT, 0};
    // An unwritable or full log (a terminal stopped by Ctrl-S, say) must never delay the job.
    if (poll(&is_free, 1, 0) == 1 && (is_free.revents & POLLOUT) != 0) {
      [[maybe_unused]] const ssize_t written = write(file, line, static_cast<std::size_t>(size));
    }
    if (is_json && file >= 0) close(file);
  }
  return nullptr;
}

__attribute__((format(printf, 1, 2))) void send_line(const char* format, ...) noexcept {
  char line[kLineBytes];
  va_list arguments;
  va_start(arguments, format);
  const int length = std::vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);
  if (g_pipe[1] < 0 || length <= 0) return;
  g_num_waiting.fetch_add(1);
  const std::size_t size = std::min(static_cast<std::size_t>(length), kLineBytes - 1);
  if (write(g_pipe[1], line, size) < 0) g_num_waiting.fetch_sub(1);
}

}  // namespace

void start_log() noexcept {
  if (g_pipe[1] >= 0 || pipe2(g_pipe, O_CLOEXEC | O_DIRECT) != 0) return;
  fcntl(g_pipe[1], F_SETFL, O_NONBLOCK | O_DIRECT);
  fcntl(g_pipe[1], F_SETPIPE_SZ, kWaitingBytes);
  if (const char* folder = value_of("DYNAMICCL_LOG_DIR")) {
    char host[64] = "";
    gethostname(host, sizeof host - 1);
    std::snprintf(g_path, sizeof g_path, "%s/dynamiccl-%s-%d.jsonl", folder, host,
                  static_cast<int>(getpid()));
  }
  if (!start_thread(run, nullptr, "dynamiccl-log")) {
    close(g_pipe[1]);
    g_pipe[1] = -1;  // nobody would read it
  }
}

bool log_is_written() noexcept { return g_num_waiting.load() == 0; }

void log_decision(const Coordinator::Decided& decided) noexcept {
  static bool has_spoken = false;  // of the coordinator's thread alone
  char identity[2 * kMaxIdentityBytes], reason[2 * kMaxReasonBytes];
  if (!std::exchange(has_spoken, true)) {
    send_line("DynamICCL: first communicator, %u ranks: %s%s%s\n", decided.num_ranks,
              decided.is_table ? "the artifact's table, from call 0" : "NCCL's own choice",
              decided.is_table ? "" : ": ", decided.reason);
  }
  if (g_path[0] == '\0') return;
  escape(decided.identity, identity, sizeof identity);
  escape(decided.reason, reason, sizeof reason);
  const std::uint64_t now_ms = realtime_ns() / 1'000'000;  // in halves: a locale may have commas
  send_line("{\"time\": %" PRIu64 ".%03" PRIu64 ", \"communicator\": \"%016" PRIx64
            "\", \"ranks\": %u, \"votes\": %u, \"decision\": \"%s\", \"reason\": \"%s\", "
            "\"took_ms\": %" PRIu64 ", \"identity\": \"%s\"}\n",
            now_ms / 1'000, now_ms % 1'000, decided.comm_id, decided.num_ranks, decided.num_votes,
            decided.is_table ? "table" : "abstain", reason, decided.took_ms, identity);
}

}  // namespace dynamiccl
