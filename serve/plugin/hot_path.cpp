// What nearly every getCollInfo comes to, in functions that call none.
//
// Whatever is not usual leaves by a tail call, with all that it needs in registers.
#include "choice_avx2.h"
#include "tuner.h"

namespace dynamiccl {

/// A call that has begun, the general way.
__attribute__((noinline, cold)) ncclResult_t Context::answer_unusual(bool is_free, int collective,
                                                                     std::size_t size_bytes,
                                                                     float* cells,
                                                                     int* num_channels) noexcept {
  return answer_begun(is_free, collective, size_bytes, {cells, kNumAlgorithms, kNumProtocols},
                      num_channels);
}

#if defined(__x86_64__)

#define DYNAMICCL_HOT __attribute__((target("avx2,bmi,bmi2,lzcnt")))

namespace {

/// The long way, without the communicator and its table.
__attribute__((noinline, cold)) ncclResult_t force_unsure(Ready ready, const Named* named,
                                                          float* cells,
                                                          int* num_channels) noexcept {
  const int num_nodes = named == kNamed[0].entries ? 1 : 2;
  force_any<NamedBy::kNumCells>(entry_of(ready), num_nodes, cells, num_channels);
  return ncclSuccess;
}

DYNAMICCL_HOT __attribute__((always_inline)) inline int force_usual(Ready ready, const Named* named,
                                                                    float* cells,
                                                                    int* num_channels) noexcept {
  if (!is_open(ready)) return force_ready(ready, named, cells, num_channels);
  return ready == 0 ? -1 : force_open(ready, named, cells, num_channels);
}

}  // namespace

DYNAMICCL_HOT ncclResult_t Context::answer_fast(int collective, std::size_t size_bytes,
                                                float* cells, int* num_channels) noexcept {
  Clock* const clock = clock_;
  std::uint64_t call;
  if (__builtin_expect(!clock->begin_unfenced(&call), 0)) {
    return answer_unusual(false, collective, size_bytes, cells, num_channels);
  }
  const int place = TableInForce::find_ready(collective, size_bytes);
  const Ready ready = clock->in_force().ready_at(place);
  const Named* const named = named_;
  // First, since it needs the registers: nothing of the communicator may be touched afterwards.
  clock->end(call, collective, size_bytes);
  if (force_usual(ready, named, cells, num_channels) != kUnsure) return ncclSuccess;
  return force_unsure(ready, named, cells, num_channels);
}

DYNAMICCL_HOT ncclResult_t Context::answer_fast_with_chunks(int collective, std::size_t size_bytes,
                                                            float* cells,
                                                            int* num_channels) noexcept {
  Clock* const clock = clock_;
  std::uint64_t call;
  if (__builtin_expect(!clock->begin_unfenced(&call), 0)) {
    return answer_unusual(false, collective, size_bytes, cells, num_channels);
  }
  const TableInForce& table = clock->in_force();
  const int place = TableInForce::find_ready(collective, size_bytes);
  const int cell = force_usual(table.ready_at(place), named_, cells, num_channels);
  if (__builtin_expect(cell == kUnsure, 0)) {
    return answer_unusual(true, collective, size_bytes, cells, num_channels);
  }
  chunks_.question();
  if (cell >= 0) chunks_.answered(collective, cell, table.entry_at(place).chunk_bytes);
  clock->end(call, collective, size_bytes);
  return ncclSuccess;
}

#else

ncclResult_t Context::answer_fast(int collective, std::size_t size_bytes, float* cells,
                                  int* num_channels) noexcept {
  return answer(collective, size_bytes, {cells, kNumAlgorithms, kNumProtocols}, num_channels);
}

ncclResult_t Context::answer_fast_with_chunks(int collective, std::size_t size_bytes, float* cells,
                                              int* num_channels) noexcept {
  return answer(collective, size_bytes, {cells, kNumAlgorithms, kNumProtocols}, num_channels);
}

#endif

}  // namespace dynamiccl
