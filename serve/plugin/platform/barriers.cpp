#include "platform/barriers.h"

#include <linux/membarrier.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace dynamiccl {

bool barrier_all_threads() noexcept {
  const auto call = [](int command) { return syscall(SYS_membarrier, command, 0, 0) == 0; };
  if (call(MEMBARRIER_CMD_PRIVATE_EXPEDITED)) return true;
  // The first call fails until the process has registered.
  return call(MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED) && call(MEMBARRIER_CMD_PRIVATE_EXPEDITED);
}

}  // namespace dynamiccl
