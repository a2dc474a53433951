// Every field is zero at the start, as the kernel gives the memory.
#include "tests/job/board.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace {

Board* map(int num_slots, int descriptor) {
  void* memory = mmap(nullptr, Board::size_bytes(num_slots), PROT_READ | PROT_WRITE, MAP_SHARED,
                      descriptor, 0);
  if (memory == MAP_FAILED) throw std::runtime_error("the board cannot be mapped");
  return static_cast<Board*>(memory);
}

}  // namespace

Board* create_board(int num_slots, int* descriptor) {
  static_assert(sizeof(Board) % alignof(Lane) == 0, "lanes follow the board");
  *descriptor = memfd_create("board", 0);
  const auto size_bytes = static_cast<off_t>(Board::size_bytes(num_slots));
  if (*descriptor < 0 || ftruncate(*descriptor, size_bytes) != 0) {
    throw std::runtime_error("no memory for the board");
  }
  return map(num_slots, *descriptor);
}

Board* open_board(int num_slots, int descriptor) { return map(num_slots, descriptor); }

void Times::add(std::uint64_t ns) {
  const double octaves = std::log2(static_cast<double>(ns) + 1);
  const int bucket = std::min(static_cast<int>(8 * octaves), kTimeBuckets - 1);
  counts[bucket].fetch_add(1, std::memory_order_relaxed);
  std::uint64_t longest = longest_ns;
  while (ns > longest && !longest_ns.compare_exchange_weak(longest, ns)) {
  }
}

double bucket_ns(int bucket) { return std::exp2((bucket + 1) / 8.0) - 1; }
