// The tuner of tuner/, with a vendor's tuner asked first on every call, so that "NCCL's own choice"
// means what would run without ours.
//
// Environment (read once per process, when the first communicator is created):
//   DYNAMICCL_NEXT_TUNER  the vendor's plugin: a path or soname, or NAME for
//                         libnccl-tuner-NAME.so, as NCCL_TUNER_PLUGIN takes it.
//
// NCCL itself guards no plugin against a finalize beside a call (ncclCommAbort): theirs sees what
// it would see without us, and what is ours here is never freed.
#include <strings.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "identity/environment.h"
#include "nccl/tuner_shell.h"
#include "platform/allocate.h"
#include "platform/dynamic.h"
#include "platform/threads.h"
#include "tuner/init.h"

namespace {

using namespace dynamiccl;

constexpr char kVariable[] = "DYNAMICCL_NEXT_TUNER";

// ---- The vendor's library, found as NCCL finds its own

/// The vendor's functions for one version of NCCL's ABI.
struct NextPlugin {
  int version;         // of the vendor's struct, which is at most NCCL's; 0: there is none
  const void* plugin;  // its ncclTuner_v<version>_t

  template <typename Struct>
  const Struct* as() const noexcept {
    return static_cast<const Struct*>(plugin);
  }
  const char* name() const noexcept {  // the first field of every version's struct
    return *as<const char*>() != nullptr ? *as<const char*>() : "";
  }
};

Mutex g_mutex;
bool g_is_looked_for = false;  // under the mutex, like the library
void* g_library = nullptr;     // never closed

/// Opens it: the string itself, else libnccl-tuner-<string>.so. Null when the variable is unset or
/// "none", or after one line in the log.
void* open_next(const Communicator& communicator) noexcept {
  const char* name = value_of(kVariable);
  if (name == nullptr || strcasecmp(name, "none") == 0) return nullptr;
  void* library = open_library(name);
  const std::size_t length = std::strlen(name);
  const bool is_soname = std::strncmp(name, "lib", 3) == 0 && length >= 3 &&
                         std::strcmp(name + length - 3, ".so") == 0;
  if (library == nullptr && std::strchr(name, '/') == nullptr && !is_soname) {
    char soname[512];
    std::snprintf(soname, sizeof soname, "libnccl-tuner-%s.so", name);
    library = open_library(soname);
  }
  if (library == nullptr) {
    say(communicator, NCCL_LOG_INFO, "%s (%s): goes on without it: %s", kVariable, name,
        library_error());
  }
  return library;
}

/// The newest of its structs up to version `abi_version`. Whether there is one costs one line in
/// the log of the process.
NextPlugin find_next(int abi_version, const Communicator& communicator) noexcept {
  const Lock lock(&g_mutex);
  const bool is_first = !g_is_looked_for;
  g_is_looked_for = true;
  if (is_first) g_library = open_next(communicator);
  NextPlugin next = {0, nullptr};
  if (g_library == nullptr) return next;
  for (int version = abi_version; version >= 2 && next.version == 0; --version) {
    char symbol[32];
    std::snprintf(symbol, sizeof symbol, "ncclTunerPlugin_v%d", version);
    const void* plugin = find_symbol(g_library, symbol);
    if (plugin != nullptr) next = {version, plugin};
  }
  char detail[64] = "goes on without it: it exports no tuner that this NCCL takes";
  if (next.version != 0 && std::strcmp(next.name(), kName) == 0) {  // it would never end
    std::strcpy(detail, "goes on without it: that is this plugin itself");
    next = {0, nullptr};
  } else if (next.version != 0) {
    std::snprintf(detail, sizeof detail, "is asked first on every call (v%d)", next.version);
  }
  if (is_first) {
    say(communicator, NCCL_LOG_INFO, "%s (%s): %s", kVariable, value_of(kVariable), detail);
  }
  return next;
}

// ---- Asking both

/// The context that NCCL holds for a communicator.
struct Both {
  NextPlugin next;
  void* theirs;                // the next one's context
  const DecisionTable* table;  // ours; null: NCCL's own choice, or theirs, stands
};

constexpr int kMostCells = kMostAlgorithms * kNumProtocols;

bool has_cell(const CostTable& costs, int algorithm, int protocol) noexcept {
  const int cell = algorithm * costs.num_protocols + protocol;
  return algorithm < costs.num_algorithms && protocol < costs.num_protocols &&
         costs.cells[cell] != kCostIgnore;
}

/// NCCL's own way with a v2 plugin (`src/plugin/tuner/tuner_v2.cc`).
ncclResult_t ask_v2(const ncclTuner_v2_t* tuner, void* context, const Question& question) noexcept {
  const CostTable& costs = question.costs;
  const bool has_nvls = has_cell(costs, kNVLS, kSimple) || has_cell(costs, kNVLSTree, kSimple);
  int algorithm = -1, protocol = -1;
  const ncclResult_t result = tuner->getCollInfo(
      context, question.collective, question.size_bytes, has_cell(costs, kCollNetChain, kSimple),
      has_nvls, question.num_pipe_ops, &algorithm, &protocol, question.num_channels);
  if (result == ncclSuccess && algorithm >= 0 && protocol >= 0 &&
      has_cell(costs, algorithm, protocol)) {
    costs.cells[algorithm * costs.num_protocols + protocol] = 0.0F;
  }
  return result;
}

/// The next float below a positive one; by hand, since libm is not linked.
float just_below(float cost) noexcept {
  std::uint32_t bits;
  std::memcpy(&bits, &cost, sizeof bits);
  --bits;
  std::memcpy(&cost, &bits, sizeof cost);
  return cost;
}

/// The costs that ours is to decide by: NCCL's, but that a cell which the vendor made free is just
/// below the cheapest. Left free it would win a tie, and make every Ring look relegated.
void show(const float* before, const float* after, int num_cells, float* shown) noexcept {
  float cheapest = INFINITY;
  for (int i = 0; i < num_cells; ++i) {
    if (before[i] > 0.0F) cheapest = std::min(cheapest, before[i]);
  }
  for (int i = 0; i < num_cells; ++i) {
    const bool is_freed = after[i] == 0.0F && before[i] != 0.0F;
    shown[i] = is_freed ? just_below(cheapest) : after[i];
  }
}

ncclResult_t ask_theirs(const Both& both, const Question& question) noexcept {
  float** table = reinterpret_cast<float**>(question.costs.cells);
  const int algorithms = question.costs.num_algorithms, protocols = question.costs.num_protocols;
  switch (both.next.version) {
    case 2:
      return ask_v2(both.next.as<ncclTuner_v2_t>(), both.theirs, question);
    case 3:
      return both.next.as<ncclTuner_v3_t>()->getCollInfo(
          both.theirs, question.collective, question.size_bytes, question.num_pipe_ops, table,
          algorithms, protocols, question.num_channels);
    default:  // v4 to v6 have this one at one place
      return both.next.as<ncclTuner_v4_t>()->getCollInfo(
          both.theirs, question.collective, question.size_bytes, question.num_pipe_ops, table,
          algorithms, protocols, question.reg_buff, question.num_channels);
  }
}

/// The vendor's tuner, then ours unless it returned an error: NCCL would stop there, too.
ncclResult_t ask_both(const Both& both, const Question& question) noexcept {
  const CostTable& costs = question.costs;
  const bool is_ours = both.table != nullptr && is_about_a_cell(question.num_pipe_ops);
  if (both.next.version == 0) {
    if (!is_ours) return ncclSuccess;
    answer(*both.table, question.collective, question.size_bytes, costs, question.num_channels);
    return ncclSuccess;
  }
  const bool is_table = is_sound(costs);
  const int num_cells = is_table ? costs.num_algorithms * costs.num_protocols : 0;
  float before[kMostCells], shown[kMostCells], decided[kMostCells];
  std::copy_n(costs.cells, num_cells, before);
  int channels = *question.num_channels;
  const ncclResult_t result = ask_theirs(both, question);
  if (result != ncclSuccess || !is_ours || !is_table) return result;
  show(before, costs.cells, num_cells, shown);
  std::copy_n(shown, num_cells, decided);
  const CostTable ours = {decided, costs.num_algorithms, costs.num_protocols};
  answer(*both.table, question.collective, question.size_bytes, ours, &channels);
  for (int cell = 0; cell < num_cells; ++cell) {
    if (decided[cell] != 0.0F || shown[cell] == 0.0F) continue;
    for (int i = 0; i < num_cells; ++i) {
      if (costs.cells[i] == 0.0F) costs.cells[i] = before[i];
    }
    costs.cells[cell] = 0.0F;
    *question.num_channels = channels;
  }
  return ncclSuccess;
}

/// The vendor's `init`, and then ours.
ncclResult_t init_both(const Communicator& communicator, int abi_version,
                       ncclTunerConstants_v5_t* constants, Both* both) noexcept {
  const NextPlugin& next = both->next;
  const std::size_t ranks = communicator.num_ranks, nodes = communicator.num_nodes;
  ncclResult_t result = ncclSuccess;
  if (next.version >= 5) {
    result = next.as<ncclTuner_v5_t>()->init(&both->theirs, communicator.comm_id, ranks, nodes,
                                             communicator.logger, communicator.domains, constants);
  } else if (next.version != 0) {  // v2 to v4 are alike in this
    result = next.as<ncclTuner_v4_t>()->init(ranks, nodes, communicator.logger, &both->theirs);
  }
  if (result != ncclSuccess || abi_version == 2) return result;
  char asked_first[128] = "none";
  if (next.version != 0) {
    std::snprintf(asked_first, sizeof asked_first, "%s (v%d)", next.name(), next.version);
  }
  result = init_communicator(communicator, asked_first, &both->table);
  if (result != ncclSuccess && next.version != 0) {
    next.as<ncclTuner_v2_t>()->destroy(both->theirs);
  }
  return result;
}

struct VendorTuner {
  static ncclResult_t create(Communicator communicator, int abi_version,
                             ncclTunerConstants_v5_t* constants, void** context) noexcept {
    if (abi_version < 5) communicator.comm_id = take_comm_id(communicator);
    auto* both = allocate<Both>();
    if (both == nullptr) return ncclSystemError;  // theirs may have to act on all ranks alike
    both->next = find_next(abi_version, communicator);
    const ncclResult_t result = init_both(communicator, abi_version, constants, both);
    if (result == ncclSuccess && (both->next.version != 0 || both->table != nullptr)) {
      *context = both;
    } else {
      deallocate(both);
    }
    return result;
  }

  static ncclResult_t answer(void* context, const Question& question) noexcept {
    return ask_both(*static_cast<const Both*>(context), question);
  }

  static ncclResult_t finalize(void* context) noexcept {
    const auto* both = static_cast<const Both*>(context);
    if (both->next.version == 0) return ncclSuccess;
    return both->next.as<ncclTuner_v2_t>()->destroy(both->theirs);  // at one place in v2 to v6
  }
};

/// NCCL 2.21 passes no cost table, so available cells are unknown: the vendor's answer stands.
ncclResult_t getCollInfo_v2(void* context, ncclFunc_t collType, std::size_t nBytes,
                            int collNetSupport, int nvlsSupport, int numPipeOps, int* algorithm,
                            int* protocol, int* nChannels) noexcept {
  const auto* both = static_cast<const Both*>(context);
  if (both == nullptr) return ncclSuccess;
  return both->next.as<ncclTuner_v2_t>()->getCollInfo(both->theirs, collType, nBytes,
                                                      collNetSupport, nvlsSupport, numPipeOps,
                                                      algorithm, protocol, nChannels);
}

ncclResult_t getChunkSize(void* context, ncclFunc_t collType, std::size_t nBytes, int algo,
                          int proto, int nChannels, std::size_t* chunkSize) noexcept {
  const auto* both = static_cast<const Both*>(context);
  if (both == nullptr || both->next.version < 6) return ncclSuccess;
  const auto* theirs = both->next.as<ncclTuner_v6_t>();
  if (theirs->getChunkSize == nullptr) return ncclSuccess;
  return theirs->getChunkSize(both->theirs, collType, nBytes, algo, proto, nChannels, chunkSize);
}

using Vendor = Shell<VendorTuner>;

}  // namespace

const ncclTuner_v2_t ncclTunerPlugin_v2 = {kName, Vendor::init<2>, getCollInfo_v2,
                                           Vendor::finalize};
const ncclTuner_v3_t ncclTunerPlugin_v3 = Vendor::v3;
const ncclTuner_v4_t ncclTunerPlugin_v4 = Vendor::v4;
const ncclTuner_v5_t ncclTunerPlugin_v5 = Vendor::v5;
const ncclTuner_v6_t ncclTunerPlugin_v6 = {kName, Vendor::initWithId<6>, Vendor::getCollInfo,
                                           Vendor::finalize, getChunkSize};
