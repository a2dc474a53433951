// A tuner plugin for tests, of NCCL 2.30's ABI alone: it writes down every call, in order, into the
// file RECORD_FILE, and does what RECORD_* says.
//
//   RECORD_FORCE     algorithm,protocol,channels: sets that cell to zero
//   RECORD_CHUNK     bytes that getChunkSize answers
//   RECORD_DISAGREE  each context asks for as many channels as its number
//   RECORD_ERROR     init or ask: that call returns ncclInvalidUsage
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "tuner_abi.h"

namespace {

std::intptr_t contexts = 0;

void record(const char* call, void* context, long a, long b, long c, long d) {
  if (const char* path = std::getenv("RECORD_FILE")) {
    if (std::FILE* file = std::fopen(path, "a")) {
      const long number = static_cast<long>(reinterpret_cast<std::intptr_t>(context));
      std::fprintf(file, "%s %ld %ld %ld %ld %ld\n", call, number, a, b, c, d);
      std::fclose(file);
    }
  }
}

ncclResult_t fails(const char* call) {
  const char* wanted = std::getenv("RECORD_ERROR");
  return wanted != nullptr && std::strcmp(wanted, call) == 0 ? ncclInvalidUsage : ncclSuccess;
}

ncclResult_t init(void** context, std::uint64_t, std::size_t ranks, std::size_t nodes,
                  ncclDebugLogger_t log, ncclNvlDomainInfo_v5_t* domains,
                  ncclTunerConstants_v5_t*) {
  *context = reinterpret_cast<void*>(++contexts);
  record("init", *context, static_cast<long>(ranks), static_cast<long>(nodes), domains->nNvlDomains,
         domains->maxRanksPerNvlDomain);
  log(NCCL_LOG_INFO, NCCL_TUNING, __FILE__, __LINE__, "%s", "recording");
  return fails("init");
}

ncclResult_t ask(void* context, ncclFunc_t function, std::size_t bytes, int, float** costs,
                 int algorithms, int protocols, int, int* channels) {
  record("ask", context, function, static_cast<long>(bytes), algorithms, protocols);
  int algorithm = -1;
  int protocol = -1;
  if (const char* text = std::getenv("RECORD_FORCE")) {
    std::sscanf(text, "%d,%d,%d", &algorithm, &protocol, channels);
    reinterpret_cast<float*>(costs)[algorithm * protocols + protocol] = 0.0F;
  }
  if (std::getenv("RECORD_DISAGREE") != nullptr) {
    *channels = static_cast<int>(reinterpret_cast<std::intptr_t>(context));
  }
  return fails("ask");
}

ncclResult_t chunk(void* context, ncclFunc_t function, std::size_t bytes, int, int, int channels,
                   std::size_t* size) {
  record("chunk", context, function, static_cast<long>(bytes), channels, static_cast<long>(*size));
  if (const char* text = std::getenv("RECORD_CHUNK")) *size = std::strtoul(text, nullptr, 10);
  return ncclSuccess;
}

ncclResult_t finalize(void* context) {
  record("finalize", context, 0, 0, 0, 0);
  return ncclSuccess;
}

}  // namespace

extern "C" const ncclTuner_v6_t ncclTunerPlugin_v6 = {"recorder", init, ask, finalize, chunk};
