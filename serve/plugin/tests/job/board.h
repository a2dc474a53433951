// The memory that the launcher and its rank processes share: what each rank would run at each call,
// how far it is, and what happened to it. It outlives a rank that is killed.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "tests/job/options.h"

constexpr int kMaxRanks = 16;
constexpr int kRingRecords = 1024;  // that the launcher may be behind, a rank and communicator

/// What one rank would run at one call of one communicator.
struct Record {
  std::uint64_t call;  // of this communicator
  std::uint64_t size_bytes;
  std::uint32_t generation;
  std::uint32_t question;
  std::int32_t num_channels;
  std::uint8_t collective, algorithm, protocol;
  bool acted;
  bool replayed;
};

/// One rank's side of one communicator slot; written by that rank's thread alone.
struct Lane {
  std::atomic<std::uint64_t> issued;   // records written, through all generations
  std::atomic<std::uint64_t> checked;  // records read, by the launcher
  std::atomic<std::uint64_t> stage;    // creations entered and left, to meet the others there
  std::atomic<bool> gone;              // it will issue no more: done, failed or aborted
  std::atomic<bool> lost;              // ... and not because all calls were made
  Record ring[kRingRecords];
};

struct RankState {
  std::atomic<bool> dead;
  std::atomic<std::uint32_t> request;  // index of an action + 1 that the launcher is to do; 0: none
  std::atomic<std::uint64_t> calls_asked, errors, violations;
  std::atomic<std::uint64_t> asked_longest_ns, created_longest_ns;
};

/// Every field is zero at the start, as the kernel gives the memory.
struct Board {
  std::atomic<bool> go;
  RankState ranks[kMaxRanks];
  // Lane [slot][rank] follow.

  Lane& lane(int slot, int rank) {
    return reinterpret_cast<Lane*>(this + 1)[slot * kMaxRanks + rank];
  }
  static std::size_t size_bytes(int num_slots) {
    return sizeof(Board) + sizeof(Lane) * static_cast<std::size_t>(num_slots * kMaxRanks);
  }
};
