// libnccl-tuner-dynamiccl-sweep.so: plays a schedule, call by call, inside one benchmark process;
// never for a job.
//
// A benchmark's calls are known beforehand. All ranks hold the same schedule and see the same
// calls, so counting them is enough to agree; should a call not be the one expected, every rank
// sees that at the same call, and every rank stops playing for good. Here alone an `init` fails on
// purpose: a schedule that cannot be played would measure something else than it says, or hang.
//
// Environment (read once per communicator, at its creation):
//   DYNAMICCL_MODE           must be `sweep`, else NCCL's own choice stands.
//   DYNAMICCL_DISABLE        1: NCCL's own choice stands.
//   DYNAMICCL_SCHEDULE       path of the schedule (dynamiccl/schedule.py writes it).
//   DYNAMICCL_SCHEDULE_HASH  its hash, 16 hexadecimal digits, from the launcher: with a stale copy,
//                            a node's ranks would play another schedule.
//   DYNAMICCL_SWEEP_REPORT   path of the report, which must not exist yet; the rank that creates
//                            it writes it. Default: none.
#include <strings.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <cinttypes>
#include <cstdio>
#include <cstring>

#include "choice.h"
#include "file.h"
#include "identity/environment.h"
#include "nccl/tuner_shell.h"
#include "platform/allocate.h"
#include "platform/threads.h"
#include "sweep/schedule.h"

namespace {

using namespace dynamiccl;

// ---- The report

struct ReportHeader {
  std::uint8_t magic[8];
  std::uint32_t version;
  std::int32_t num_blocks;
  std::uint64_t checksum;
  std::uint64_t calls;
  std::uint64_t stopped_at_call;
  std::uint64_t expected_bytes;
  std::uint64_t found_bytes;
  std::int32_t found_collective;
  std::int32_t zero;
};
static_assert(sizeof(ReportHeader) == kReportHeaderBytes, "the file's header, byte for byte");

/// Reserve the whole file: a store into a hole of it on a full disk would be a SIGBUS.
const char* reserve(int descriptor, std::size_t size_bytes) noexcept {
  rlimit limit;
  // Beyond this limit the reservation would not fail but end the process (SIGXFSZ).
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur < size_bytes) {
    return "files may not grow that long here";
  }
  int error = EINTR;
  while (error == EINTR) error = posix_fallocate(descriptor, 0, static_cast<off_t>(size_bytes));
  return error == 0 ? nullptr : "its space cannot be reserved";
}

/// What was played, in a mapped file that outlives a kill. The format is in dynamiccl/schedule.py.
///
/// A store makes no system call; but the kernel may have to make the page writable first, which can
/// take long on a network file system. So what a benchmark times should not store: see Player. Nor
/// need an NFS client write such pages before it wants their memory: `sync` sends them, in a call
/// that nobody times, and so does the end.
class Report {
 public:
  ~Report() {
    if (header == nullptr) return;
    sync(0);
    munmap(header, size_bytes_);
  }

  /// Create the file; null on success, and when another rank has created it and reports, else why
  /// there is none.
  const char* create(const char* path, std::int32_t num_blocks, std::uint64_t checksum) noexcept {
    const auto count = static_cast<std::size_t>(num_blocks);
    size_bytes_ = sizeof *header + count * (sizeof *chunks_ + sizeof *states_);
    const File file(path, O_RDWR | O_CREAT | O_EXCL);
    if (!file.is_open()) return errno == EEXIST ? nullptr : "it cannot be created";
    const char* problem = reserve(file.descriptor(), size_bytes_);
    void* memory = MAP_FAILED;
    if (problem == nullptr) {
      memory = mmap(nullptr, size_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file.descriptor(), 0);
      if (memory == MAP_FAILED) problem = "it cannot be mapped";
    }
    if (problem != nullptr) {
      unlink(path);  // ours, and of no use to anyone
      return problem;
    }
    header = static_cast<ReportHeader*>(memory);
    chunks_ = reinterpret_cast<std::uint32_t*>(header + 1);
    states_ = reinterpret_cast<std::uint8_t*>(chunks_ + count);
    header->version = kReportVersion;
    header->num_blocks = num_blocks;
    header->checksum = checksum;
    std::memcpy(header->magic, kReportMagic, sizeof kReportMagic);  // last: now it is one
    return nullptr;
  }

  /// Write what was stored to the file's server, unless that was done less than `every_ns` ago.
  void sync(std::uint64_t every_ns) noexcept {
    if (header == nullptr || monotonic_ns() - synced_ns_ < every_ns) return;
    synced_ns_ = monotonic_ns();
    msync(header, size_bytes_, MS_SYNC);  // where it fails, the kernel writes later
  }

  void set_calls(std::uint64_t calls) noexcept {
    if (header != nullptr) header->calls = calls;
  }
  void set_state(std::int32_t block, BlockState state) noexcept {
    if (header != nullptr) states_[block] = state;
  }
  /// Keeps the smallest that a block got.
  void set_chunk(std::int32_t block, std::uint32_t chunk_bytes) noexcept {
    if (header == nullptr) return;
    std::uint32_t& smallest = chunks_[block];
    if (smallest == 0 || chunk_bytes < smallest) smallest = chunk_bytes;
  }

  ReportHeader* header = nullptr;  // null: there is none, and every call does nothing

 private:
  std::uint32_t* chunks_ = nullptr;
  std::uint8_t* states_ = nullptr;
  std::size_t size_bytes_ = 0;
  std::uint64_t synced_ns_ = 0;  // CLOCK_MONOTONIC
};

// ---- Playing

/// Tells which getChunkSize calls belong to the latest getCollInfo.
///
/// NCCL asks about each part of a collective on its own, with the part's size: nothing in the
/// question says which call it belongs to (`src/enqueue.cc`, v2.30.7-1). In a group all getCollInfo
/// calls come first, so with two of them before it a question may be about either.
class ChunkTurn {
 public:
  /// A getCollInfo has come.
  void question() noexcept {
    questions_ = asked_ ? 1 : std::min(questions_ + 1, 2U);
    asked_ = false;
    chunk_bytes_ = 0;
  }

  /// It was answered with this cell, and its chunks are to have so many bytes (0: NCCL's own).
  void answered(int collective, int cell, std::int32_t chunk_bytes) noexcept {
    collective_ = collective;
    cell_ = cell;
    chunk_bytes_ = chunk_bytes;
  }

  /// A getChunkSize: true when the chunk was set, which is never above NCCL's own nor below a
  /// grain.
  bool answer(int collective, int algorithm, int protocol, std::size_t* chunk_bytes) noexcept {
    // NCCL rounds a chunk down to these, and divides by what is left (the same place).
    constexpr std::size_t kGrainBytes[kNumProtocols] = {16, 1920, 512};
    asked_ = true;
    if (chunk_bytes_ == 0 || questions_ != 1 || collective != collective_ ||
        algorithm != cell_ / kNumProtocols || protocol != cell_ % kNumProtocols) {
      return false;
    }
    const std::size_t grain = kGrainBytes[protocol];
    if (*chunk_bytes < grain) return false;  // more than this would not be ours to give
    const std::size_t wanted = std::min(*chunk_bytes, static_cast<std::size_t>(chunk_bytes_));
    *chunk_bytes = std::max<std::size_t>(wanted / grain, 1) * grain;
    return true;
  }

 private:
  std::uint32_t questions_ = 0;  // getCollInfo calls since the last run of getChunkSize calls
  bool asked_ = false;           // such a run has begun
  int collective_ = -1;
  int cell_ = -1;
  std::int32_t chunk_bytes_ = 0;
};

/// One communicator's way through a schedule. NCCL uses a communicator from one thread at a time.
/// Were it not so, nobody could count: a call that comes during another ends the playing.
class Player {
 public:
  ~Player() { report.set_calls(calls_); }

  /// Load the schedule at `path` for a communicator. Null on success, else why it must not be
  /// played. `hash` is what the launcher says that the file's checksum is.
  const char* load(const char* path, const char* hash, std::size_t num_ranks,
                   std::size_t num_nodes) noexcept {
    if (const char* problem = load_schedule(path, &schedule)) return problem;
    char own[17];
    std::snprintf(own, sizeof own, "%016" PRIx64, schedule.checksum);
    if (strcasecmp(own, hash) != 0) return "its hash is not DYNAMICCL_SCHEDULE_HASH";
    if (static_cast<std::size_t>(schedule.num_ranks) != num_ranks ||
        static_cast<std::size_t>(schedule.num_nodes) != num_nodes) {
      return "it was made for another number of ranks or nodes";
    }
    plays_.store(true, std::memory_order_relaxed);
    return nullptr;
  }

  /// Count a getCollInfo and give it what its block is to run, or touch nothing.
  void answer(int collective, std::size_t size_bytes, CostTable costs, int* num_channels) noexcept {
    const Stay stay(this);
    if (!stay.is_alone) return;
    ++calls_;
    chunks_.question();
    if (!plays_.load(std::memory_order_relaxed) || !begin_call()) return;
    if (size_bytes != expected_bytes_ || collective != schedule.collective) {
      stop_at(collective, size_bytes);
      return;
    }
    // nccl-tests times neither the warm-up nor the first call of a half: see Report.
    const auto half = static_cast<std::uint64_t>(schedule.calls_per_half);
    const bool untimed = block_ < 0 || calls_left_ == half || calls_left_ == 2 * half;
    --calls_left_;
    if (untimed) report.set_calls(calls_);
    if (block_ >= 0) note(play(costs, num_channels));
    if (untimed) report.sync(kSyncEveryNs);
  }

  /// A getChunkSize: give the block's chunk size when the question surely is about its call.
  void answer_chunk(int collective, int algorithm, int protocol,
                    std::size_t* chunk_bytes) noexcept {
    const Stay stay(this);
    if (stay.is_alone && chunks_.answer(collective, algorithm, protocol, chunk_bytes)) {
      report.set_chunk(block_, static_cast<std::uint32_t>(*chunk_bytes));
    }
  }

  /// ncclCommAbort finalizes from another thread while a call may be inside (`src/init.cc`): false
  /// where it did not leave in time, and then nothing may be freed under it.
  bool close() noexcept {
    is_closed_.store(true);
    return wait_until([this] { return inside_.load() == 0; });
  }

  Schedule schedule;
  Report report;

 private:
  static constexpr std::uint64_t kSyncEveryNs = 1'000'000'000;

  /// One call's stay inside.
  struct Stay {
    explicit Stay(Player* of) noexcept
        : player(of), is_alone(of->inside_.fetch_add(1) == 0 && !of->is_closed_.load()) {
      if (!is_alone) of->plays_.store(false, std::memory_order_relaxed);
    }
    ~Stay() { player->inside_.fetch_sub(1); }
    Player* player;
    bool is_alone;
  };

  /// Find the warm-up run or block of a call; false when it comes after the last one.
  bool begin_call() noexcept {
    if (calls_left_ != 0) return true;
    if (warmup_run_ < schedule.num_warmup_runs) {
      const WarmupRun& run = schedule.warmup[warmup_run_++];
      expected_bytes_ = run.size_bytes;
      calls_left_ = run.num_calls;
      return true;
    }
    if (block_ + 1 == schedule.num_blocks) return false;
    previous_bytes_ = expected_bytes_;
    previous_state_ = state_;
    ++block_;
    expected_bytes_ = schedule.sizes[block_ % schedule.num_sizes];
    calls_left_ = static_cast<std::uint64_t>(schedule.calls_per_half) *
                  static_cast<std::uint64_t>(schedule.halves);
    config_ = &schedule.configs[schedule.blocks[block_]];
    state_ = kNotReached;
    return true;
  }

  /// Not the call that was expected: what is being measured is not what the schedule says.
  void stop_at(int collective, std::size_t size_bytes) noexcept {
    plays_.store(false, std::memory_order_relaxed);
    if (report.header != nullptr) {
      report.header->calls = report.header->stopped_at_call = calls_;
      report.header->expected_bytes = expected_bytes_;
      report.header->found_bytes = size_bytes;
      report.header->found_collective = collective;
    }
    if (state_ == kPlayed) {
      report.set_state(block_, kMixed);
    } else if (state_ == kNotReached && previous_state_ == kPlayed &&
               size_bytes == previous_bytes_) {
      report.set_state(block_ - 1, kMixed);  // it has more calls than it should have
    }
  }

  BlockState play(CostTable costs, int* num_channels) noexcept {
    if (config_->act == 0) return kAbstained;
    const int cell =
        is_sound(costs) ? choose(*config_, schedule.num_nodes, costs, num_channels) : -1;
    if (cell < 0) return kUnavailable;
    chunks_.answered(schedule.collective, cell, config_->chunk_bytes);
    return kPlayed;
  }

  void note(BlockState state) noexcept {
    const BlockState now = state_ == kNotReached || state_ == state ? state : kMixed;
    if (now == state_) return;
    state_ = now;
    report.set_state(block_, now);
  }

  std::atomic<bool> plays_{false};
  std::atomic<bool> is_closed_{false};
  std::atomic<std::uint32_t> inside_{0};  // calls
  std::uint64_t calls_ = 0;

  // The warm-up run or block in which the next call is.
  std::uint64_t calls_left_ = 0;
  std::uint64_t expected_bytes_ = 0;
  std::int32_t warmup_run_ = 0;  // the next one
  std::int32_t block_ = -1;      // -1: in the warm-up
  const Entry* config_ = nullptr;
  BlockState state_ = kNotReached;
  // The block before.
  std::uint64_t previous_bytes_ = 0;
  BlockState previous_state_ = kNotReached;

  ChunkTurn chunks_;
};

// ---- What NCCL sees

/// Loads what is to be played; null on success, else why the communicator must not come to be.
/// What fails here on one rank alone would hang all of them later.
const char* load(const Communicator& communicator, int abi_version, const char* path,
                 Player* player) noexcept {
  if (player == nullptr) return "memory is short";
  if (path == nullptr) return "DYNAMICCL_SCHEDULE is not set";
  const char* hash = value_of("DYNAMICCL_SCHEDULE_HASH");
  if (hash == nullptr) return "DYNAMICCL_SCHEDULE_HASH is not set";
  const char* reason = player->load(path, hash, communicator.num_ranks, communicator.num_nodes);
  if (reason != nullptr) return reason;
  // Played without them, its measurements would be of something else than they say.
  const bool chunks_are_lost = player->schedule.sets_chunks && abi_version < 6;
  return chunks_are_lost ? "its chunk sizes need NCCL 2.30 or later" : nullptr;
}

struct SweepTuner {
  static ncclResult_t create(const Communicator& communicator, int abi_version,
                             ncclTunerConstants_v5_t*, void** context) noexcept {
    if (in_forked_child() || is_one("DYNAMICCL_DISABLE")) return ncclSuccess;
    const char* mode = value_of("DYNAMICCL_MODE");
    if (mode == nullptr || std::strcmp(mode, "sweep") != 0) {
      say(communicator, NCCL_LOG_INFO,
          "NCCL's own choice stands: this library is for sweeps, and DYNAMICCL_MODE is '%s'",
          mode != nullptr ? mode : "");
      return ncclSuccess;
    }
    const char* path = value_of("DYNAMICCL_SCHEDULE");
    auto* player = allocate<Player>();
    if (const char* reason = load(communicator, abi_version, path, player)) {
      deallocate(player);
      say(communicator, NCCL_LOG_WARN, "cannot sweep: %s%s%s", path != nullptr ? path : "",
          path != nullptr ? ": " : "", reason);
      return ncclInvalidUsage;
    }
    const Schedule& schedule = player->schedule;
    const char* report = value_of("DYNAMICCL_SWEEP_REPORT");
    if (report != nullptr) {
      const char* problem = player->report.create(report, schedule.num_blocks, schedule.checksum);
      if (problem != nullptr) {
        say(communicator, NCCL_LOG_WARN, "no sweep report: %s: %s", report, problem);
      }
    }
    const bool reports = player->report.header != nullptr;
    say(communicator, NCCL_LOG_INFO, "plays %d blocks from %s (hash %016" PRIx64 ", tuner v%d)%s%s",
        schedule.num_blocks, path, schedule.checksum, abi_version, reports ? ", reports to " : "",
        reports ? report : "");
    *context = player;
    return ncclSuccess;
  }

  static ncclResult_t answer(void* context, const Question& question) noexcept {
    if (!is_about_a_cell(question.num_pipe_ops)) return ncclSuccess;
    static_cast<Player*>(context)->answer(question.collective, question.size_bytes, question.costs,
                                          question.num_channels);
    return ncclSuccess;
  }

  static ncclResult_t finalize(void* context) noexcept {
    auto* player = static_cast<Player*>(context);
    if (player->close()) deallocate(player);
    return ncclSuccess;
  }
};

/// v6. `nBytes` and `nChannels` are of one part of a collective: nothing to find the whole by.
ncclResult_t getChunkSize(void* context, ncclFunc_t collType, std::size_t, int algo, int proto, int,
                          std::size_t* chunkSize) noexcept {
  if (context == nullptr || chunkSize == nullptr) return ncclSuccess;
  static_cast<Player*>(context)->answer_chunk(collType, algo, proto, chunkSize);
  return ncclSuccess;
}

using Sweep = Shell<SweepTuner>;

}  // namespace

const ncclTuner_v4_t ncclTunerPlugin_v4 = Sweep::v4;
const ncclTuner_v5_t ncclTunerPlugin_v5 = Sweep::v5;
const ncclTuner_v6_t ncclTunerPlugin_v6 = {kName, Sweep::init<6>, Sweep::getCollInfo,
                                           Sweep::finalize, getChunkSize};
