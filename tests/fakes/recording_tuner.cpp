// A tuner plugin for tests: it writes down every call, in order, into the file RECORD_FILE, and
// does what RECORD_* says. All five ABIs over one body, as NCCL may take any of them.
//
//   RECORD_FORCE     algorithm,protocol,channels: sets that cell to zero (v2: returns it)
//   RECORD_CHUNK     bytes that getChunkSize answers
//   RECORD_DISAGREE  the second context asks for one channel more than the first
//   RECORD_ERROR     init or ask: that call returns ncclInvalidUsage
//   RECORD_UNAVAILABLE  writes into a cell that NCCL does not have
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "tuner_abi.h"

namespace {

constexpr auto kInvalidUsage = static_cast<ncclResult_t>(5);
int contexts = 0;

void record(const char* format, long a, long b, long c, long d) {
  if (const char* path = std::getenv("RECORD_FILE")) {
    if (std::FILE* file = std::fopen(path, "a")) {
      std::fprintf(file, format, a, b, c, d);
      std::fclose(file);
    }
  }
}

ncclResult_t fails(const char* call) {
  const char* wanted = std::getenv("RECORD_ERROR");
  return wanted != nullptr && std::strcmp(wanted, call) == 0 ? kInvalidUsage : ncclSuccess;
}

ncclResult_t start(void** context, std::size_t ranks, std::size_t nodes, ncclDebugLogger_t log) {
  *context = reinterpret_cast<void*>(static_cast<std::intptr_t>(++contexts));
  record("init %ld ranks %ld nodes %ld%.0ld\n", contexts, static_cast<long>(ranks),
         static_cast<long>(nodes), 0);
  log(NCCL_LOG_INFO, NCCL_TUNING, __FILE__, __LINE__, "%s", "recording");
  return fails("init");
}

struct Forced {
  int algorithm = -1, protocol = -1, channels = 0;
};

Forced forced(void* context) {
  Forced cell;
  if (const char* text = std::getenv("RECORD_FORCE")) {
    std::sscanf(text, "%d,%d,%d", &cell.algorithm, &cell.protocol, &cell.channels);
  }
  if (std::getenv("RECORD_DISAGREE") != nullptr) {
    cell.channels = static_cast<int>(reinterpret_cast<std::intptr_t>(context));
  }
  return cell;
}

ncclResult_t ask(void* context, int function, std::size_t bytes, float** costs, int algorithms,
                 int protocols, int* channels) {
  record("ask %ld function %ld bytes %ld algorithms %ld\n",
         static_cast<long>(reinterpret_cast<std::intptr_t>(context)), function,
         static_cast<long>(bytes), algorithms);
  float* table = reinterpret_cast<float*>(costs);
  const Forced cell = forced(context);
  if (cell.algorithm >= 0 && table[cell.algorithm * protocols + cell.protocol] >= 0.0F) {
    table[cell.algorithm * protocols + cell.protocol] = 0.0F;
  }
  if (cell.channels != 0) *channels = cell.channels;
  if (std::getenv("RECORD_UNAVAILABLE") != nullptr) table[2 * protocols] = 0.0F;
  return fails("ask");
}

ncclResult_t end(void* context) {
  record("finalize %ld%.0ld%.0ld%.0ld\n",
         static_cast<long>(reinterpret_cast<std::intptr_t>(context)), 0, 0, 0);
  return ncclSuccess;
}

ncclResult_t init2(std::size_t ranks, std::size_t nodes, ncclDebugLogger_t log, void** context) {
  return start(context, ranks, nodes, log);
}

ncclResult_t init5(void** context, std::uint64_t, std::size_t ranks, std::size_t nodes,
                   ncclDebugLogger_t log, ncclNvlDomainInfo_v5_t* domains,
                   ncclTunerConstants_v5_t*) {
  record("domains %ld of %ld to %ld%.0ld\n", domains->nNvlDomains, domains->minRanksPerNvlDomain,
         domains->maxRanksPerNvlDomain, 0);
  return start(context, ranks, nodes, log);
}

ncclResult_t ask2(void* context, ncclFunc_t function, std::size_t bytes, int, int nvls, int,
                  int* algorithm, int* protocol, int* channels) {
  record("ask %ld function %ld bytes %ld nvls %ld\n",
         static_cast<long>(reinterpret_cast<std::intptr_t>(context)), function,
         static_cast<long>(bytes), nvls);
  const Forced cell = forced(context);
  *algorithm = cell.algorithm;
  *protocol = cell.protocol;
  *channels = cell.channels;
  return fails("ask");
}

ncclResult_t ask3(void* context, ncclFunc_t function, std::size_t bytes, int, float** costs,
                  int algorithms, int protocols, int* channels) {
  return ask(context, function, bytes, costs, algorithms, protocols, channels);
}

ncclResult_t ask4(void* context, ncclFunc_t function, std::size_t bytes, int, float** costs,
                  int algorithms, int protocols, int, int* channels) {
  return ask(context, function, bytes, costs, algorithms, protocols, channels);
}

ncclResult_t chunk(void* context, ncclFunc_t, std::size_t bytes, int, int, int channels,
                   std::size_t* size) {
  record("chunk %ld bytes %ld channels %ld own %ld\n",
         static_cast<long>(reinterpret_cast<std::intptr_t>(context)), static_cast<long>(bytes),
         channels, static_cast<long>(*size));
  if (const char* text = std::getenv("RECORD_CHUNK")) {
    *size = static_cast<std::size_t>(std::strtoul(text, nullptr, 10));
  }
  return ncclSuccess;
}

}  // namespace

extern "C" {
extern const ncclTuner_v2_t ncclTunerPlugin_v2 = {"recorder", init2, ask2, end};
extern const ncclTuner_v3_t ncclTunerPlugin_v3 = {"recorder", init2, ask3, end};
extern const ncclTuner_v4_t ncclTunerPlugin_v4 = {"recorder", init2, ask4, end};
extern const ncclTuner_v5_t ncclTunerPlugin_v5 = {"recorder", init5, ask4, end};
extern const ncclTuner_v6_t ncclTunerPlugin_v6 = {"recorder", init5, ask4, end, chunk};
}
