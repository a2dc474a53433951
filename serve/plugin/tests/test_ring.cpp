// The ring keeps each producer's order, loses nothing but what it counts, and waits for nobody.
#include <thread>
#include <vector>

#include "profiler/ring.h"
#include "tests/check.h"

using namespace dynamiccl;

namespace {

CallRecord record_of(std::uint64_t producer, std::uint64_t number) {
  CallRecord record = {};
  record.comm_id = producer;
  record.sequence = number;
  record.stop_ns = ~number;  // torn records would show
  return record;
}

void full_ring_drops_and_counts() {
  Ring* ring = Ring::create(8);
  CallRecord record;
  CHECK(!ring->pop(&record));
  for (int lap = 0; lap < 5; ++lap) {
    for (std::uint64_t i = 0; i < 11; ++i) CHECK(ring->push(record_of(0, i)) == (i < 8));
    for (std::uint64_t i = 0; i < 8; ++i) CHECK(ring->pop(&record) && record.sequence == i);
    CHECK(!ring->pop(&record));
    CHECK(ring->dropped() == 3 * static_cast<std::uint64_t>(lap + 1));
  }
  Ring::destroy(ring);
  Ring::destroy(nullptr);
}

void many_producers() {
  constexpr int kProducers = 4;
  constexpr std::uint64_t kEach = 50'000;
  Ring* ring = Ring::create(1024);
  std::vector<std::thread> producers;
  std::atomic<int> running{kProducers};
  for (int producer = 0; producer < kProducers; ++producer) {
    producers.emplace_back([&, producer] {
      for (std::uint64_t i = 0; i < kEach; ++i) {
        ring->push(record_of(static_cast<std::uint64_t>(producer), i));
        if (i % 64 == 0) std::this_thread::yield();
      }
      --running;
    });
  }
  std::uint64_t next[kProducers] = {};
  std::uint64_t taken = 0;
  CallRecord record;
  while (true) {
    const bool is_last = running.load() == 0;
    while (ring->pop(&record)) {
      ++taken;
      CHECK(record.stop_ns == ~record.sequence);
      CHECK(record.comm_id < kProducers && record.sequence >= next[record.comm_id]);
      next[record.comm_id] = record.sequence + 1;
    }
    if (is_last) break;
  }
  for (std::thread& thread : producers) thread.join();
  CHECK(taken + ring->dropped() == kProducers * kEach);
  Ring::destroy(ring);
}

}  // namespace

int main() {
  full_ring_drops_and_counts();
  many_producers();
  return g_failures;
}
