// libnccl-tuner-dynamiccl-sweep.so: plays a schedule in a benchmark; never for a job.
//
// As in tuner/exports.cpp NCCL's own names are used. Here alone an `init` fails on purpose: a
// schedule that cannot be played would measure something else than it says, or hang.
//
// Environment (read once per communicator, at its creation; player.h has the schedule's):
//   DYNAMICCL_MODE     must be `sweep`, else NCCL's own choice stands.
//   DYNAMICCL_DISABLE  1: NCCL's own choice stands.
#include <cinttypes>
#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "identity/environment.h"
#include "nccl/tuner_abi.h"
#include "platform/allocate.h"
#include "platform/barriers.h"
#include "platform/threads.h"
#include "sweep/playing.h"

namespace {

using namespace dynamiccl;

constexpr char kName[] = "DynamICCL";

struct Asked {
  int abi_version;
  std::size_t num_ranks;
  std::size_t num_nodes;
  ncclDebugLogger_t logger;  // may be null
};

/// Hands NCCL a line as one %s, so that no other varargs cross the boundary.
__attribute__((format(printf, 3, 4))) void say(const Asked& asked, ncclDebugLogLevel level,
                                               const char* format, ...) noexcept {
  if (asked.logger == nullptr) return;
  char line[4096 + 512];
  const int head = std::snprintf(
      line, sizeof line, "DYNAMICCL: %zu ranks on %zu nodes: ", asked.num_ranks, asked.num_nodes);
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(line + head, sizeof line - static_cast<std::size_t>(head), format, arguments);
  va_end(arguments);
  asked.logger(level, NCCL_INIT | NCCL_TUNING, "dynamiccl", __LINE__, "%s", line);
}

/// Loads what is to be played; null on success, else why the communicator must not come to be.
/// What fails here on one rank alone would hang all of them later.
const char* load(const Asked& asked, const char* path, Player* player) noexcept {
  if (asked.abi_version == 2) return "sweep mode needs NCCL 2.22 or later";
  if (path == nullptr) return "DYNAMICCL_SCHEDULE is not set";
  const char* hash = value_of("DYNAMICCL_SCHEDULE_HASH");
  if (hash == nullptr) return "DYNAMICCL_SCHEDULE_HASH is not set";
  const char* reason = player->load(path, hash, asked.num_ranks, asked.num_nodes);
  if (reason != nullptr) return reason;
  // Played without them, its measurements would be of something else than they say.
  const bool chunks_are_lost = player->schedule().sets_chunks && asked.abi_version < 6;
  return chunks_are_lost ? "its chunk sizes need NCCL 2.30 or later" : nullptr;
}

ncclResult_t create(const Asked& asked, void** context) noexcept {
  if (context == nullptr) return ncclSuccess;
  *context = nullptr;
  if (in_forked_child() || is_one("DYNAMICCL_DISABLE")) return ncclSuccess;
  const char* mode = value_of("DYNAMICCL_MODE");
  if (mode == nullptr || std::strcmp(mode, "sweep") != 0) {
    say(asked, NCCL_LOG_INFO,
        "NCCL's own choice stands: this library is for sweeps, and DYNAMICCL_MODE is '%s'",
        mode != nullptr ? mode : "");
    return ncclSuccess;
  }
  const char* path = value_of("DYNAMICCL_SCHEDULE");
  auto* playing = allocate<Playing>();
  const char* reason = playing != nullptr ? load(asked, path, &playing->player) : "memory is short";
  if (reason != nullptr) {
    deallocate(playing);
    say(asked, NCCL_LOG_WARN, "cannot sweep: %s%s%s", path != nullptr ? path : "",
        path != nullptr ? ": " : "", reason);
    return ncclInvalidUsage;
  }
  Player& player = playing->player;
  const char* report = value_of("DYNAMICCL_SWEEP_REPORT");
  if (report != nullptr) {
    if (const char* problem = player.report_to(report)) {
      say(asked, NCCL_LOG_WARN, "no sweep report: %s: %s", report, problem);
    }
  }
  say(asked, NCCL_LOG_INFO, "plays %d blocks from %s (hash %016" PRIx64 ", tuner v%d)%s%s",
      player.schedule().num_blocks, path, player.schedule().checksum, asked.abi_version,
      player.reports() ? ", reports to " : "", player.reports() ? report : "");
  *context = playing;
  return ncclSuccess;
}

/// v2, v3, v4: the context comes last.
template <int version>
ncclResult_t init(std::size_t nRanks, std::size_t nNodes, ncclDebugLogger_t logFunction,
                  void** context) noexcept {
  return create({version, nRanks, nNodes, logFunction}, context);
}

/// v5, v6: the context comes first.
template <int version>
ncclResult_t initWithId(void** context, std::uint64_t, std::size_t nRanks, std::size_t nNodes,
                        ncclDebugLogger_t logFunction, ncclNvlDomainInfo_v5_t*,
                        ncclTunerConstants_v5_t*) noexcept {
  return create({version, nRanks, nNodes, logFunction}, context);
}

ncclResult_t getCollInfo(void* context, ncclFunc_t collType, std::size_t nBytes, int numPipeOps,
                         float** collCostTable, int numAlgo, int numProto, int,
                         int* nChannels) noexcept {
  if (context == nullptr || collCostTable == nullptr || nChannels == nullptr) return ncclSuccess;
  if (!is_about_a_cell(numPipeOps)) return ncclSuccess;
  auto* playing = static_cast<Playing*>(context);
  const Visit visit(playing);
  if (!visit.entered()) return ncclSuccess;
  // Typed float**, and yet one flat array.
  const CostTable costs = {reinterpret_cast<float*>(collCostTable), numAlgo, numProto};
  playing->player.answer(collType, nBytes, costs, nChannels);
  return ncclSuccess;
}

ncclResult_t getCollInfo_v3(void* context, ncclFunc_t collType, std::size_t nBytes, int numPipeOps,
                            float** collCostTable, int numAlgo, int numProto,
                            int* nChannels) noexcept {
  return getCollInfo(context, collType, nBytes, numPipeOps, collCostTable, numAlgo, numProto, 0,
                     nChannels);
}

/// No communicator of v2 comes to be.
ncclResult_t getCollInfo_v2(void*, ncclFunc_t, std::size_t, int, int, int, int*, int*,
                            int*) noexcept {
  return ncclSuccess;
}

/// v6. `nBytes` and `nChannels` are of one part of a collective: nothing to find the whole by.
ncclResult_t getChunkSize(void* context, ncclFunc_t collType, std::size_t, int algo, int proto, int,
                          std::size_t* chunkSize) noexcept {
  if (context == nullptr || chunkSize == nullptr) return ncclSuccess;
  auto* playing = static_cast<Playing*>(context);
  const Visit visit(playing);
  if (visit.entered()) playing->player.answer_chunk(collType, algo, proto, chunkSize);
  return ncclSuccess;
}

ncclResult_t finalize(void* context) noexcept {
  auto* playing = static_cast<Playing*>(context);
  if (playing == nullptr) return ncclSuccess;
  playing->is_closed.store(true);
  // Rather leaks than frees, and unmaps its report, under a call.
  if (wait_until([playing] { return playing->inside.load() == 0; })) deallocate(playing);
  return ncclSuccess;
}

}  // namespace

const ncclTuner_v2_t ncclTunerPlugin_v2 = {kName, init<2>, getCollInfo_v2, finalize};
const ncclTuner_v3_t ncclTunerPlugin_v3 = {kName, init<3>, getCollInfo_v3, finalize};
const ncclTuner_v4_t ncclTunerPlugin_v4 = {kName, init<4>, getCollInfo, finalize};
const ncclTuner_v5_t ncclTunerPlugin_v5 = {kName, initWithId<5>, getCollInfo, finalize};
const ncclTuner_v6_t ncclTunerPlugin_v6 = {kName, initWithId<6>, getCollInfo, finalize,
                                           getChunkSize};
