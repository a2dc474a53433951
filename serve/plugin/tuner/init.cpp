// See init.h.
#include "tuner/init.h"

#include <sched.h>

#include <cstdio>
#include <cstring>

#include "identity/environment.h"
#include "platform/nccl_version.h"
#include "platform/threads.h"

namespace dynamiccl {

void say(ncclDebugLogger_t logger, ncclDebugLogLevel level, std::size_t num_ranks,
         std::size_t num_nodes, const char* text) noexcept {
  if (logger == nullptr) return;
  char line[kMaxReasonBytes + 128];
  std::snprintf(line, sizeof line, "DYNAMICCL: %zu ranks on %zu nodes: %s", num_ranks, num_nodes,
                text);
  logger(level, NCCL_INIT | NCCL_TUNING, "dynamiccl", __LINE__, "%s", line);
}

ncclResult_t init_communicator(std::size_t num_ranks, std::size_t num_nodes, std::uint64_t comm_id,
                               const ncclNvlDomainInfo_v5_t* domains,
                               ncclTunerConstants_v5_t* constants, ncclDebugLogger_t logger,
                               const char* asked_first, const DecisionTable** table) noexcept {
  *table = nullptr;
  if (num_ranks < 2 || in_forked_child()) return ncclSuccess;
  if (is_one("DYNAMICCL_DISABLE")) {
    note_id(comm_id);
    return ncclSuccess;
  }
  const bool is_even =
      domains == nullptr || domains->minRanksPerNvlDomain == domains->maxRanksPerNvlDomain;
  Agreed agreed;
  const auto of_nccl = reinterpret_cast<void (*)()>(logger);
  const bool is_rccl = std::strstr(library_of(of_nccl), "librccl") != nullptr;
  agree({num_ranks, num_nodes, comm_id, nccl_version_of(of_nccl), is_rccl, constants, is_even,
         asked_first},
        &agreed);
  if (agreed.outcome == Outcome::kTable) {
    *table = agreed.table;
    if (agreed.constants != nullptr) write_constants(*agreed.constants, constants);
    say(logger, NCCL_LOG_INFO, num_ranks, num_nodes,
        agreed.table != nullptr ? "the artifact's table, from call 0"
                                : "NCCL's own choice, by the artifact's tuning constants");
    return ncclSuccess;
  }
  const bool failed = agreed.outcome == Outcome::kFailed;
  char text[kMaxReasonBytes + 64];
  std::snprintf(text, sizeof text, "%s: %s",
                failed ? "this communicator must not be used" : "NCCL's own choice stands",
                agreed.reason);
  say(logger, failed ? NCCL_LOG_WARN : NCCL_LOG_INFO, num_ranks, num_nodes, text);
  if (!failed) return ncclSuccess;
  // NCCL bound this thread to the GPU's processors, and does not undo it on its way out of an error
  // (2.30.7 `init.cc:1641,1703`). What it was before is not known: all that the job may use.
  cpu_set_t all;
  std::memset(&all, 0xff, sizeof all);
  sched_setaffinity(0, sizeof all, &all);
  return ncclRemoteError;
}

}  // namespace dynamiccl
