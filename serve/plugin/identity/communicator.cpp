// Implementation of communicator.h.
#include "identity/communicator.h"

#include <dlfcn.h>

#include <cstring>
#include <new>

#include "identity/environment.h"
#include "identity/ids.h"
#include "platform/clock.h"
#include "platform/old_symbols.h"
#include "vocabulary.h"

DYNAMICCL_OLD_SYMBOL(dladdr);
DYNAMICCL_OLD_SYMBOL(dlclose);
DYNAMICCL_OLD_SYMBOL(dlopen);
DYNAMICCL_OLD_SYMBOL(dlsym);

namespace dynamiccl {
namespace {

Mutex g_mutex;
/// Of all communicators of this process, parents of shrunk ones included. Never destroyed: it
/// outlives the process's own objects, and leaves no exit handler.
alignas(Ids) unsigned char g_room[sizeof(Ids)];
Ids* g_ids = nullptr;

/// The result of ncclGetVersion in a loaded library (null: in the program and what it is linked
/// with), such as 22809 for 2.28.9; 0 where there is none.
int nccl_version_in(const char* library) noexcept {
  void* handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
  if (handle == nullptr) return 0;
  const auto get = reinterpret_cast<int (*)(int*)>(dlsym(handle, "ncclGetVersion"));
  int version = 0;
  if (get != nullptr && get(&version) != 0) version = 0;
  dlclose(handle);  // only the count that RTLD_NOLOAD added
  return version;
}

struct CallingNccl {
  int version;
  bool is_rccl;
};

/// A process may have loaded two NCCLs: the caller is the one that contains the logger.
CallingNccl find_calling_nccl(ncclDebugLogger_t logger) noexcept {
  Dl_info nccl = {};
  const bool is_found = dladdr(reinterpret_cast<void*>(logger), &nccl) != 0;
  const char* library = is_found && nccl.dli_fname != nullptr ? nccl.dli_fname : "";
  int version = library[0] != '\0' ? nccl_version_in(library) : 0;
  if (version == 0) version = nccl_version_in(nullptr);
  return {version, std::strstr(library, "librccl") != nullptr};
}

const char* reason_to_abstain(const Communicator& communicator, const CallingNccl& nccl) noexcept {
  if (nccl.is_rccl) return "this is RCCL, whose algorithms are others";
  static_assert(kOldestNccl == 22700 && kNewestNccl == 23099, "the line below says so");
  if (nccl.version < kOldestNccl || nccl.version > kNewestNccl) {
    return "this is another release of NCCL than 2.27 to 2.30, whose sources were read";
  }
  if (value_of("NCCL_COMM_ID") != nullptr) {
    return "NCCL_COMM_ID is set, which gives all communicators one id";
  }
  if (communicator.comm_id == 0) {
    return "NCCL 2.27 tells a profiler alone which communicator it is: start the job with "
           "dynamiccl-run";
  }
  if (communicator.num_nodes == 0 || communicator.num_ranks % communicator.num_nodes != 0) {
    return "its nodes hold different numbers of ranks";
  }
  const ncclNvlDomainInfo_v5_t* domains = communicator.domains;
  if (domains != nullptr && domains->minRanksPerNvlDomain != domains->maxRanksPerNvlDomain) {
    return "its NVLink domains hold different numbers of ranks";
  }
  return nullptr;
}

}  // namespace

Checked check_communicator(const Communicator& communicator) noexcept {
  const bool ids_repeat = note_id(communicator.comm_id);  // whatever follows
  const CallingNccl nccl = find_calling_nccl(communicator.logger);
  return {nccl.version, reason_to_abstain(communicator, nccl), ids_repeat};
}

bool note_id(std::uint64_t id) noexcept {
  const Lock lock(&g_mutex);
  if (g_ids == nullptr) g_ids = new (g_room) Ids;
  return g_ids->note(id);
}

}  // namespace dynamiccl
