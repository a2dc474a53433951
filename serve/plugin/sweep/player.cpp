// libnccl-tuner-dynamiccl-sweep.so: plays a schedule, call by call, inside one benchmark process;
// never for a job.
//
// A benchmark's calls are known beforehand. All ranks hold the same schedule and see the same
// calls, so counting them is enough to agree; should a call not be the one expected, every rank
// sees that at the same call, and every rank stops playing for good. Here alone an `init` fails on
// purpose: a schedule that cannot be played would measure something else than it says, or hang.
#include <sys/resource.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "file.h"
#include "identity/environment.h"
#include "nccl/tuner_shell.h"
#include "platform/system.h"
#include "sweep/schedule.h"

namespace {

using namespace dynamiccl;

struct ReportHeader {
  std::uint8_t magic[8];
  std::uint32_t version;
  std::int32_t num_blocks;
  std::uint64_t checksum;
  std::uint64_t calls;
  std::uint64_t stopped_at_call;
  std::uint8_t zero[24];
};
static_assert(sizeof(ReportHeader) == kReportHeaderBytes, "the file's header, byte for byte");

/// What was played, in a file that outlives a kill. The format is in dynamiccl/schedule.py.
///
/// Each write is a system call, and may wait on a network file system: what a benchmark times
/// should write nothing, see Player. `sync` sends it to the file's server, in a call that nobody
/// times.
class Report {
 public:
  /// Null on success, and when another rank has created it and reports; else why there is none.
  const char* create(const char* path, const Schedule& schedule) noexcept {
    num_blocks_ = static_cast<std::size_t>(schedule.num_blocks);
    const std::size_t size_bytes = sizeof(ReportHeader) + num_blocks_ * (sizeof(std::uint32_t) + 1);
    file_.reset(open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOCTTY, 0644));
    if (!exists()) return errno == EEXIST ? nullptr : "it cannot be created";
    const char* problem = nullptr;
    rlimit limit;
    if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur < size_bytes) {
      problem = "files may not grow that long here";  // to try would end the process (SIGXFSZ)
    } else {
      int error = EINTR;
      while (error == EINTR) error = posix_fallocate(file_.descriptor(), 0, size_bytes);
      if (error != 0) problem = "its space cannot be reserved";
    }
    if (problem != nullptr) {
      unlink(path);  // ours, and of no use to anyone
      file_.reset(-1);
      return problem;
    }
    ReportHeader header = {{}, kReportVersion, schedule.num_blocks, schedule.checksum, 0, 0, {}};
    std::memcpy(header.magic, kReportMagic, sizeof kReportMagic);
    write_at(0, header);
    return nullptr;
  }

  bool exists() const noexcept { return file_.is_open(); }

  void set_calls(std::uint64_t calls) noexcept { write_at(offsetof(ReportHeader, calls), calls); }
  void set_stopped(std::uint64_t call) noexcept {
    set_calls(call);
    write_at(offsetof(ReportHeader, stopped_at_call), call);
  }
  void set_state(std::int32_t block, BlockState state) noexcept {
    const std::size_t states_at = sizeof(ReportHeader) + num_blocks_ * sizeof(std::uint32_t);
    write_at(states_at + static_cast<std::size_t>(block), state);
  }
  void set_chunk(std::int32_t block, std::uint32_t chunk_bytes) noexcept {
    write_at(sizeof(ReportHeader) + static_cast<std::size_t>(block) * sizeof chunk_bytes,
             chunk_bytes);
  }

  /// Unless that was done less than `every_ns` ago.
  void sync(std::uint64_t every_ns) noexcept {
    if (!exists() || monotonic_ns() - synced_ns_ < every_ns) return;
    synced_ns_ = monotonic_ns();
    fdatasync(file_.descriptor());  // where it fails, the kernel writes later
  }

 private:
  template <typename Value>
  void write_at(std::size_t offset, const Value& value) noexcept {
    if (!exists()) return;
    [[maybe_unused]] const ssize_t written =
        pwrite(file_.descriptor(), &value, sizeof value, static_cast<off_t>(offset));
  }

  File file_;
  std::size_t num_blocks_ = 0;
  std::uint64_t synced_ns_ = 0;  // CLOCK_MONOTONIC
};

/// One communicator's way through a schedule. NCCL uses a communicator from one thread at a time,
/// but ncclCommAbort finalizes from another while a call may be inside (`src/init.cc`).
class Player {
 public:
  ~Player() {
    report.set_calls(calls_);
    report.sync(0);
    std::free(bytes_);
  }

  /// Load the schedule at `path`. Null on success, else why it must not be played: what fails here
  /// on one rank alone would hang all of them later. `hash` is what the launcher says that the
  /// file's checksum is.
  const char* load(const char* path, const char* hash, const Communicator& communicator) noexcept {
    if (path == nullptr) return "DYNAMICCL_SCHEDULE is not set";
    if (hash == nullptr) return "DYNAMICCL_SCHEDULE_HASH is not set";
    const File file(path);
    if (!file.is_open()) return "it cannot be opened";
    bytes_ = static_cast<std::uint8_t*>(std::malloc(kMaxScheduleBytes + 1));
    if (bytes_ == nullptr) return "memory is short";
    const ssize_t size = file.read_all(bytes_, kMaxScheduleBytes + 1);
    if (size < 0) return "it cannot be read";
    const auto size_bytes = static_cast<std::size_t>(size);
    if (size_bytes > kMaxScheduleBytes) return "it is too long";
    const char* problem = decode_schedule(bytes_, size_bytes, &schedule);
    if (problem != nullptr) return problem;
    std::uint64_t wanted = 0;
    if (!parse_hex(hash, 1, &wanted) || schedule.checksum != wanted) {
      return "its hash is not DYNAMICCL_SCHEDULE_HASH";
    }
    if (static_cast<std::size_t>(schedule.num_ranks) != communicator.num_ranks ||
        static_cast<std::size_t>(schedule.num_nodes) != communicator.num_nodes) {
      return "it was made for another number of ranks or nodes";
    }
    // Played without them, its measurements would be of something else than they say.
    for (std::int32_t i = 0; i < schedule.num_configs; ++i) {
      if (schedule.configs[i].chunk_bytes != 0 && communicator.abi_version < 6) {
        return "its chunk sizes need NCCL 2.30 or later";
      }
    }
    return nullptr;
  }

  /// Count a getCollInfo and give it what its block is to run, or touch nothing.
  void answer(const Question& question) noexcept {
    ++calls_;
    num_questions_ = has_chunks_asked_ ? 1 : std::min(num_questions_ + 1, 2);
    has_chunks_asked_ = false;
    cell_ = -1;
    if (is_stopped_ || !begin_call()) return;
    if (question.size_bytes != expected_bytes_ || question.collective != schedule.collective) {
      stop(question.size_bytes);
      return;
    }
    // nccl-tests times neither the warm-up nor the first call of a half.
    const bool is_timed =
        block_ >= 0 && calls_left_ % static_cast<std::uint64_t>(schedule.calls_per_half) != 0;
    --calls_left_;
    if (!is_timed) report.set_calls(calls_);
    if (block_ >= 0) play(question);
    if (!is_timed) report.sync(kSyncEveryNs);
  }

  /// A getChunkSize: give the block's chunk size when the question surely is about its call.
  ///
  /// NCCL asks about each part of a collective on its own, with the part's size: nothing in the
  /// question says which call it belongs to (`src/enqueue.cc`, v2.30.7-1). In a group all
  /// getCollInfo calls come first, so with two of them before it, it may be about either.
  void answer_chunk(int collective, int algorithm, int protocol,
                    std::size_t* chunk_bytes) noexcept {
    // NCCL rounds a chunk down to these, and divides by what is left (the same place).
    constexpr std::size_t kGrainBytes[kNumProtocols] = {16, 1920, 512};
    has_chunks_asked_ = true;
    if (cell_ < 0 || config_->chunk_bytes == 0 || num_questions_ != 1 ||
        collective != schedule.collective || algorithm != cell_ / kNumProtocols ||
        protocol != cell_ % kNumProtocols) {
      return;
    }
    const std::size_t grain = kGrainBytes[protocol];
    if (*chunk_bytes < grain) return;  // more than this would not be ours to give
    const std::size_t wanted =
        std::min(*chunk_bytes, static_cast<std::size_t>(config_->chunk_bytes));
    *chunk_bytes = std::max<std::size_t>(wanted / grain, 1) * grain;
    if (*chunk_bytes >= smallest_chunk_bytes_) return;
    smallest_chunk_bytes_ = *chunk_bytes;
    report.set_chunk(block_, static_cast<std::uint32_t>(*chunk_bytes));
  }

  Mutex mutex;  // held in every call
  Schedule schedule;
  Report report;

 private:
  static constexpr std::uint64_t kSyncEveryNs = 1'000'000'000;

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
    smallest_chunk_bytes_ = SIZE_MAX;
    return true;
  }

  void play(const Question& question) noexcept {
    BlockState state = kAbstained;
    if (config_->act != 0) {
      if (is_sound(question.costs)) {
        cell_ = choose(*config_, schedule.num_nodes, question.costs, question.num_channels);
      }
      state = cell_ < 0 ? kUnavailable : kPlayed;
    }
    if (state_ == state || state_ == kMixed) return;
    state_ = state_ == kNotReached ? state : kMixed;
    report.set_state(block_, state_);
  }

  /// Not the call that was expected: what is being measured is not what the schedule says.
  void stop(std::size_t size_bytes) noexcept {
    is_stopped_ = true;
    report.set_stopped(calls_);
    if (state_ == kPlayed) {
      report.set_state(block_, kMixed);
    } else if (state_ == kNotReached && previous_state_ == kPlayed &&
               size_bytes == previous_bytes_) {
      report.set_state(block_ - 1, kMixed);  // it has more calls than it should have
    }
  }

  std::uint8_t* bytes_ = nullptr;  // of the schedule
  bool is_stopped_ = false;
  std::uint64_t calls_ = 0;

  // The warm-up run or block in which the next call is, and the block before.
  std::uint64_t calls_left_ = 0, expected_bytes_ = 0, previous_bytes_ = 0;
  std::int32_t warmup_run_ = 0;  // the next one
  std::int32_t block_ = -1;      // -1: in the warm-up
  const Entry* config_ = nullptr;
  BlockState state_ = kNotReached, previous_state_ = kNotReached;
  std::size_t smallest_chunk_bytes_ = SIZE_MAX;  // that this block got

  int cell_ = -1;                  // that the latest getCollInfo got; -1: none
  int num_questions_ = 0;          // getCollInfo calls since the last run of getChunkSize calls
  bool has_chunks_asked_ = false;  // such a run has begun
};

struct SweepTuner {
  static ncclResult_t create(const Communicator& communicator, void** context) noexcept {
    if (is_one("DYNAMICCL_DISABLE")) return ncclSuccess;
    const char* mode = value_of("DYNAMICCL_MODE", "");
    if (std::strcmp(mode, "sweep") != 0) {
      say(communicator, NCCL_LOG_INFO,
          "NCCL's own choice stands: this library is for sweeps, and DYNAMICCL_MODE is '%s'", mode);
      return ncclSuccess;
    }
    const char* path = value_of("DYNAMICCL_SCHEDULE");
    const char* hash = value_of("DYNAMICCL_SCHEDULE_HASH");
    auto* player = allocate<Player>();
    const char* problem =
        player == nullptr ? "memory is short" : player->load(path, hash, communicator);
    if (problem != nullptr) {
      deallocate(player);
      say(communicator, NCCL_LOG_WARN, "cannot sweep: %s%s%s", path != nullptr ? path : "",
          path != nullptr ? ": " : "", problem);
      return ncclInvalidUsage;
    }
    const char* report = value_of("DYNAMICCL_SWEEP_REPORT");
    if (report != nullptr) problem = player->report.create(report, player->schedule);
    if (problem != nullptr) {
      say(communicator, NCCL_LOG_WARN, "no sweep report: %s: %s", report, problem);
    }
    const bool reports = player->report.exists();
    say(communicator, NCCL_LOG_INFO, "plays %d blocks from %s (hash %s, tuner v%d)%s%s",
        player->schedule.num_blocks, path, hash, communicator.abi_version,
        reports ? ", reports to " : "", reports ? report : "");
    *context = player;
    return ncclSuccess;
  }

  static ncclResult_t answer(void* context, const Question& question) noexcept {
    if (!question.is_about_a_cell()) return ncclSuccess;
    auto* player = static_cast<Player*>(context);
    const Lock lock(&player->mutex);
    player->answer(question);
    return ncclSuccess;
  }

  static ncclResult_t finalize(void* context) noexcept {
    auto* player = static_cast<Player*>(context);
    {
      const Lock until_a_call_has_left(&player->mutex);
    }
    deallocate(player);
    return ncclSuccess;
  }
};

/// `nBytes` and `nChannels` are of one part of a collective: nothing to find the whole by.
ncclResult_t getChunkSize(void* context, ncclFunc_t collType, std::size_t, int algo, int proto, int,
                          std::size_t* chunkSize) noexcept {
  if (context == nullptr || chunkSize == nullptr) return ncclSuccess;
  auto* player = static_cast<Player*>(context);
  const Lock lock(&player->mutex);
  player->answer_chunk(collType, algo, proto, chunkSize);
  return ncclSuccess;
}

}  // namespace

DYNAMICCL_EXPORT_TUNER(SweepTuner, getChunkSize)
