// Which communicators may have a table at all. Asked first and once for each of them, by every
// mode: what cannot be told apart, or runs on an NCCL that nobody has read, keeps NCCL's own
// choice.
#pragma once

#include <dlfcn.h>

#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "identity/environment.h"
#include "identity/ids.h"
#include "nccl/tuner_abi.h"
#include "platform/system.h"
#include "vocabulary.h"

DYNAMICCL_OLD_SYMBOL(dladdr);
DYNAMICCL_OLD_SYMBOL(dlclose);
DYNAMICCL_OLD_SYMBOL(dlopen);
DYNAMICCL_OLD_SYMBOL(dlsym);

namespace dynamiccl {

/// What NCCL tells a tuner's `init`, and what is found of it.
struct Communicator {
  std::size_t num_ranks;
  std::size_t num_nodes;
  ncclDebugLogger_t logger;                   // may be null
  ncclNvlDomainInfo_v5_t* domains = nullptr;  // null: not told
  std::uint64_t comm_id = 0;                  // 0: not told
  int abi_version = 0;                        // of the struct that NCCL took
  ncclTunerConstants_v5_t* constants = nullptr;

  // Of check_communicator:
  int nccl_version = 0;  // of the NCCL that calls, as ncclGetVersion says; 0: unknown
  const char* reason_to_abstain = nullptr;  // the same on all its ranks; null: none
  bool ids_repeat = false;  // a reason too (ids.h), but one that its other ranks may not know
};

/// The result of ncclGetVersion in a loaded library (null: in the program and what it is linked
/// with); 0 where there is none.
inline int nccl_version_in(const char* library) noexcept {
  void* handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
  if (handle == nullptr) return 0;
  const auto get = reinterpret_cast<int (*)(int*)>(dlsym(handle, "ncclGetVersion"));
  int version = 0;
  if (get != nullptr && get(&version) != 0) version = 0;
  dlclose(handle);  // only the count that RTLD_NOLOAD added
  return version;
}

inline const char* why_not(const Communicator& communicator, const char* nccl_library) noexcept {
  if (std::strstr(nccl_library, "librccl") != nullptr) {
    return "this is RCCL, whose algorithms are others";
  }
  static_assert(kOldestNccl == 22700 && kNewestNccl == 23099, "the line below says so");
  if (communicator.nccl_version < kOldestNccl || communicator.nccl_version > kNewestNccl) {
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

/// The release of the NCCL that contains this logger, such as 22809 for 2.28.9, since a process may
/// have loaded two; else of any that is not hidden (RTLD_LOCAL); 0 where there is none. `library`:
/// its path, or "".
inline int nccl_version_of(ncclDebugLogger_t logger, const char** library) noexcept {
  Dl_info nccl = {};
  dladdr(reinterpret_cast<void*>(logger), &nccl);
  *library = nccl.dli_fname != nullptr ? nccl.dli_fname : "";
  const int version = nccl_version_in(*library);
  return version != 0 ? version : nccl_version_in(nullptr);
}

/// Whether a new communicator can be told from all others. Its id is remembered, so this must be
/// called for each communicator of the process, those that abstain for other reasons included.
inline Communicator check_communicator(Communicator communicator) noexcept {
  static Mutex mutex;
  static Ids ids;  // of all communicators of this process, parents of shrunk ones included
  const char* library = nullptr;
  communicator.nccl_version = nccl_version_of(communicator.logger, &library);
  communicator.reason_to_abstain = why_not(communicator, library);
  const Lock lock(&mutex);
  communicator.ids_repeat = ids.note(communicator.comm_id);  // whatever its reason is
  return communicator;
}

/// A line in NCCL's log.
__attribute__((format(printf, 3, 4))) inline void say(const Communicator& communicator,
                                                      ncclDebugLogLevel level, const char* format,
                                                      ...) noexcept {
  if (communicator.logger == nullptr) return;
  char line[4096 + 512];
  const int head = std::snprintf(line, sizeof line,
                                 "DYNAMICCL: %zu ranks on %zu nodes: ", communicator.num_ranks,
                                 communicator.num_nodes);
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(line + head, sizeof line - static_cast<std::size_t>(head), format, arguments);
  va_end(arguments);
  // As one %s, so that no other varargs cross the boundary.
  communicator.logger(level, NCCL_INIT | NCCL_TUNING, "dynamiccl", __LINE__, "%s", line);
}

}  // namespace dynamiccl
