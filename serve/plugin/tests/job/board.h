// What the rank processes share, and play.py reads: what each rank would run at each call, how
// far it is, and what happened to it. It outlives a rank that is killed.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "tests/job/options.h"

/// CLOCK_MONOTONIC, here also the GPU's clock.
inline std::uint64_t now_ns() {
  return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}

/// What one aggregate of collectives would run; the same on all ranks, or the job hangs.
struct Outcome {
  std::uint64_t size_bytes, question;  // a hash of all that the choice may depend on
  int collective, algorithm, protocol, num_channels;
  int acted;     // the plugin wrote something
  int replayed;  // from a graph
};

struct Record {
  Outcome outcome;
  int generation, call;  // a call of this generation
};
static_assert(sizeof(Record) == 48, "play.py reads it");

/// One rank's side of one communicator slot; written by that rank's thread alone.
struct Lane {
  enum End : int { playing, done, lost };

  std::atomic<int> issued;  // records written, through all generations
  std::atomic<int> stage;   // creations entered and left, to meet the others there
  std::atomic<int> end;
  int members;  // a bit for each rank
};

struct RankState {
  std::atomic<std::uint64_t> asked, asked_longest_ns, created_longest_ns;
  std::atomic<int> kills_itself;
  std::atomic<int> dead;  // written by play.py
};

/// Every field is zero at the start, as the kernel gives the memory, and takes none until then.
class Board {
 public:
  explicit Board(const Options& options)
      : num_records_(options["calls"] + options["max-group"] + 64),
        num_lanes_(16 * options["comms"]) {
    const std::size_t size_bytes = 16 * sizeof(RankState) + num_lanes_ * sizeof(Lane) +
                                   num_lanes_ * num_records_ * sizeof(Record);
    void* memory = mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE,
                        options["board"], 0);
    if (memory == MAP_FAILED) throw std::invalid_argument("--board is play.py's own");
    ranks_ = static_cast<RankState*>(memory);
  }

  RankState& rank(int rank) const { return ranks_[rank]; }
  Lane& lane(int slot, int rank) const {
    return reinterpret_cast<Lane*>(ranks_ + 16)[16 * slot + rank];
  }
  Record& record(int slot, int rank, std::size_t index) const {
    if (index >= num_records_) throw std::logic_error("more calls than there is room for");
    auto* records = reinterpret_cast<Record*>(&lane(0, 0) + num_lanes_);
    return records[static_cast<std::size_t>(16 * slot + rank) * num_records_ + index];
  }

 private:
  const std::size_t num_records_, num_lanes_;
  RankState* ranks_ = nullptr;
};

/// Of the rank that this process plays.
inline RankState* g_state = nullptr;

/// Says something to play.py: L of the log, V a violation, E an error.
inline void tell(char kind, std::string text) {
  for (char& letter : text) {
    if (letter == '\n') letter = ' ';
  }
  const std::string line = kind + text + "\n";
  // Appended whole, so that lines of several threads do not mix.
  if (write(STDOUT_FILENO, line.data(), line.size()) < 0) std::abort();
}

/// The plugin did what NCCL does not survive, or what the project's law forbids.
inline void complain(const std::string& what) { tell('V', what); }

inline void raise_to(std::atomic<std::uint64_t>* most, std::uint64_t value) {
  std::uint64_t seen = *most;
  while (value > seen && !most->compare_exchange_weak(seen, value)) {
  }
}
