// A shrunk communicator's id is known by its parent's: as NCCL 2.30.7's own bitops.h gives it, for
// the parent's id, child number 0 and colour 0.
#include "identity/communicator.h"
#include "tests/check.h"

int main() {
  using dynamiccl::id_of_shrunk;
  CHECK(id_of_shrunk(0x0000000000000001) == 0xe04d65164a9c0f25);
  CHECK(id_of_shrunk(0x123456789abcdef0) == 0x0ea127523541c571);
  CHECK(id_of_shrunk(0xfedcba9876543210) == 0xf77654e4e8d9ddde);
  return g_failures;
}
