// The logger has no argument that names the communicator, so there is one for the process.
#include "tests/job/log.h"

#include <atomic>
#include <cstdarg>
#include <cstdio>

namespace {

std::atomic<Witness*> g_witness{nullptr};
thread_local bool t_is_ours = false;

}  // namespace

void set_witness(Witness* witness) { g_witness = witness; }

void adopt_thread() { t_is_ours = true; }

void nccl_log(ncclDebugLogLevel level, unsigned long, const char*, int, const char* format, ...) {
  Witness* witness = g_witness;
  if (witness == nullptr) return;
  char line[8192];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);
  if (!t_is_ours) witness->violation("logged from a thread of its own: " + std::string(line));
  witness->log(level, line);
}
