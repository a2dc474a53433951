// A shrunk communicator's id is known by its parent's: as NCCL 2.30.7's own bitops.h gives it, for
// the parent's id, child number 0 and colour 0. And a process that has made many knows each of
// them.
#include "identity/communicator.h"
#include "identity/ids.h"
#include "tests/check.h"

int main() {
  using dynamiccl::id_of_shrunk;
  CHECK(id_of_shrunk(0x0000000000000001) == 0xe04d65164a9c0f25);
  CHECK(id_of_shrunk(0x123456789abcdef0) == 0x0ea127523541c571);
  CHECK(id_of_shrunk(0xfedcba9876543210) == 0xf77654e4e8d9ddde);

  dynamiccl::Ids ids;
  for (std::uint64_t id = 1; id <= 70'000; ++id) CHECK(!ids.note(id * 0x9e3779b97f4a7c15U));
  CHECK(!ids.note(0));
  CHECK(!ids.note(0x9e3779b97f4a7c15U));  // the same one again
  for (std::uint64_t number = 1; number <= 70'000; number += 34'999) {
    dynamiccl::Ids other = ids;
    CHECK(other.note(id_of_shrunk(number * 0x9e3779b97f4a7c15U)));
    CHECK(other.note(4));  // and whatever comes later
  }
  CHECK(!dynamiccl::note_id(5));
  CHECK(dynamiccl::note_id(id_of_shrunk(5)));
  return g_failures;
}
