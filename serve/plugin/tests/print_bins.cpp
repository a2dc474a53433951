// Reads sizes from stdin and prints their bins: tests/serve compares them with Python's.
#include <cinttypes>
#include <cstdio>

#include "table.h"

int main() {
  std::uint64_t size = 0;
  while (std::scanf("%" SCNu64, &size) == 1) std::printf("%d\n", dynamiccl::size_bin(size));
  return 0;
}
