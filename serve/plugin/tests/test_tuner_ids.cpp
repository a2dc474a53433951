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

  for (std::uint64_t number = 1; number <= 70'000; number += 34'999) {
    dynamiccl::Ids ids;
    for (std::uint64_t id = 1; id <= 70'000; ++id) CHECK(!ids.note(id * 0x9e3779b97f4a7c15U));
    CHECK(!ids.note(0));
    CHECK(!ids.note(0x9e3779b97f4a7c15U));  // the same one again
    CHECK(ids.note(id_of_shrunk(number * 0x9e3779b97f4a7c15U)));
    CHECK(ids.note(4));  // and whatever comes later
  }
  CHECK(!dynamiccl::check_communicator({8, 1, nullptr, nullptr, 5}).ids_repeat);
  CHECK(dynamiccl::check_communicator({8, 1, nullptr, nullptr, id_of_shrunk(5)}).ids_repeat);
  return g_failures;
}
