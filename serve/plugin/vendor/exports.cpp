// The tuner of tuner/, with a vendor's tuner asked first on every call, so that "NCCL's own choice"
// means what would run without ours.
//
// NCCL itself guards no plugin against a finalize beside a call (ncclCommAbort): theirs sees what
// it would see without us, and what is ours here is never freed.
#include <dlfcn.h>
#include <strings.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "identity/environment.h"
#include "platform/system.h"
#include "tuner/init.h"

DYNAMICCL_OLD_SYMBOL(dlerror);

namespace {

using namespace dynamiccl;

/// The context that NCCL holds for a communicator.
struct Both {
  // The vendor's tuner, of the newest version that both it and NCCL have; null: there is none.
  // Older structs than v6 begin alike, but for arguments: of v3's and v4's `init`, and of v3's
  // `getCollInfo`.
  const ncclTuner_v6_t* next = nullptr;
  int version = 0;
  void* theirs = nullptr;                // its context
  const DecisionTable* table = nullptr;  // ours; null: NCCL's own choice, or theirs, stands
};

/// Opens the library as NCCL does: the string itself, else libnccl-tuner-<string>.so.
void* open_next(const char* name) noexcept {
  void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (library != nullptr || std::strchr(name, '/') != nullptr ||
      std::strstr(name, ".so") != nullptr) {
    return library;
  }
  char soname[512];
  std::snprintf(soname, sizeof soname, "libnccl-tuner-%s.so", name);
  return dlopen(soname, RTLD_NOW | RTLD_LOCAL);
}

/// The library is looked for once a process, which costs one line in the log, and never closed.
void find_next(const Communicator& communicator, Both* both) noexcept {
  static Mutex mutex;
  static bool is_looked_for = false;
  static void* library = nullptr;
  const char* name = value_of("DYNAMICCL_NEXT_TUNER");
  const Lock lock(&mutex);
  const bool is_first = !is_looked_for && name != nullptr && strcasecmp(name, "none") != 0;
  is_looked_for = true;
  char said[1024] = "goes on without it: it exports no tuner of v3 to v6 that this NCCL takes";
  if (is_first) library = open_next(name);
  if (is_first && library == nullptr) {
    const char* why = dlerror();
    std::snprintf(said, sizeof said, "goes on without it: %s", why != nullptr ? why : "");
  }
  for (int version = communicator.abi_version; library != nullptr && version >= 3; --version) {
    char symbol[32];
    std::snprintf(symbol, sizeof symbol, "ncclTunerPlugin_v%d", version);
    const auto* next = static_cast<const ncclTuner_v6_t*>(dlsym(library, symbol));
    if (next == nullptr) continue;
    if (next->name != nullptr && std::strcmp(next->name, kName) == 0) {  // it would never end
      std::strcpy(said, "goes on without it: that is this plugin itself");
      break;
    }
    both->next = next;
    both->version = version;
    std::snprintf(said, sizeof said, "is asked first on every call (v%d)", version);
    break;
  }
  if (is_first) say(communicator, NCCL_LOG_INFO, "DYNAMICCL_NEXT_TUNER (%s): %s", name, said);
}

/// The vendor's `init`, and then ours.
ncclResult_t init_both(const Communicator& communicator, Both* both) noexcept {
  const ncclTuner_v6_t* next = both->next;
  if (next == nullptr) return init_communicator(communicator, "none", &both->table);
  const std::size_t ranks = communicator.num_ranks, nodes = communicator.num_nodes;
  const auto* v4 = reinterpret_cast<const ncclTuner_v4_t*>(next);
  ncclResult_t result =
      both->version < 5
          ? v4->init(ranks, nodes, communicator.logger, &both->theirs)
          : next->init(&both->theirs, communicator.comm_id, ranks, nodes, communicator.logger,
                       communicator.domains, communicator.constants);
  if (result != ncclSuccess) return result;
  char asked_first[128];
  const char* name = next->name != nullptr ? next->name : "";
  std::snprintf(asked_first, sizeof asked_first, "%s (v%d)", name, both->version);
  result = init_communicator(communicator, asked_first, &both->table);
  if (result != ncclSuccess) next->finalize(both->theirs);
  return result;
}

struct VendorTuner {
  static ncclResult_t create(const Communicator& communicator, void** context) noexcept {
    auto* both = allocate<Both>();
    if (both == nullptr) return ncclSystemError;  // theirs may have to act on all ranks alike
    find_next(communicator, both);
    const ncclResult_t result = init_both(communicator, both);
    if (result == ncclSuccess && (both->next != nullptr || both->table != nullptr)) {
      *context = both;
    } else {
      deallocate(both);
    }
    return result;
  }

  /// The vendor's tuner, then ours unless it returned an error: NCCL would stop there, too.
  static ncclResult_t answer(void* context, const Question& question) noexcept {
    const auto& both = *static_cast<const Both*>(context);
    const CostTable& costs = question.costs;
    const int num_cells = is_sound(costs) ? costs.num_algorithms * costs.num_protocols : 0;
    float before[kMostAlgorithms * kNumProtocols], shown[kMostAlgorithms * kNumProtocols];
    std::copy_n(costs.cells, num_cells, before);
    int channels = *question.num_channels;
    if (both.next != nullptr) {
      const auto ask = [&](auto get_coll_info, auto... reg_buff) {
        return get_coll_info(both.theirs, question.collective, question.size_bytes,
                             question.num_pipe_ops, reinterpret_cast<float**>(costs.cells),
                             costs.num_algorithms, costs.num_protocols, reg_buff...,
                             question.num_channels);
      };
      const auto* v3 = reinterpret_cast<const ncclTuner_v3_t*>(both.next);
      const ncclResult_t result =
          both.version == 3 ? ask(v3->getCollInfo) : ask(both.next->getCollInfo, question.reg_buff);
      if (result != ncclSuccess) return result;
    }
    const Entry* entry = both.table != nullptr ? entry_for(*both.table, question) : nullptr;
    if (entry == nullptr) return ncclSuccess;
    // Ours decides by NCCL's costs, but that a cell which the vendor made free is just below the
    // cheapest. Left free it would win a tie, and make every Ring look relegated.
    float cheapest = INFINITY;
    for (int i = 0; i < num_cells; ++i) {
      if (before[i] > 0.0F) cheapest = std::min(cheapest, before[i]);
    }
    for (int i = 0; i < num_cells; ++i) {
      const bool is_freed = costs.cells[i] == 0.0F && before[i] != 0.0F;
      shown[i] = is_freed ? cost_of(order_of(cheapest) - 1) : costs.cells[i];
    }
    const CostTable ours = {shown, costs.num_algorithms, costs.num_protocols};
    const int cell = choose(*entry, both.table->num_nodes, ours, &channels);
    if (cell < 0) return ncclSuccess;
    for (int i = 0; i < num_cells; ++i) {
      if (costs.cells[i] == 0.0F) costs.cells[i] = before[i];
    }
    costs.cells[cell] = 0.0F;
    *question.num_channels = channels;
    return ncclSuccess;
  }

  static ncclResult_t finalize(void* context) noexcept {
    const auto* both = static_cast<const Both*>(context);
    return both->next != nullptr ? both->next->finalize(both->theirs) : ncclSuccess;
  }
};

ncclResult_t getChunkSize(void* context, ncclFunc_t collType, std::size_t nBytes, int algo,
                          int proto, int nChannels, std::size_t* chunkSize) noexcept {
  const auto* both = static_cast<const Both*>(context);
  if (both == nullptr || both->version < 6 || both->next->getChunkSize == nullptr) {
    return ncclSuccess;
  }
  return both->next->getChunkSize(both->theirs, collType, nBytes, algo, proto, nChannels,
                                  chunkSize);
}

}  // namespace

DYNAMICCL_EXPORT_TUNER(VendorTuner, getChunkSize)
