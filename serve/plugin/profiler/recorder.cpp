// The calls files, which collect/calls.py reads, and the thread that writes them.
//
// A file is a header and then entries, each with a checksum of its own: a process may be killed
// while it writes. All numbers are little-endian. All writing is done with write(): a store into a
// mapped file on a full disk would be a signal.

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>

#include "file.h"
#include "identity/communicator.h"
#include "identity/environment.h"
#include "platform/system.h"
#include "profiler/profiler.h"
#include "vocabulary.h"

DYNAMICCL_OLD_SYMBOL(pthread_attr_setstacksize);
DYNAMICCL_OLD_SYMBOL(pthread_create);
DYNAMICCL_OLD_SYMBOL(pthread_detach);

namespace dynamiccl {
namespace {

// ---- The files: one writer, rotated, within a bound on disk. The thread's alone, once it runs

struct Header {
  char magic[8] = "DCCALLS";
  std::uint32_t version = 1;
  std::uint32_t header_bytes = 512;
  std::uint32_t entry_bytes = 80;
  std::uint32_t number;
  std::int32_t pid;
  std::uint32_t zero;
  std::uint64_t created_ns;
  std::int32_t world_rank;    // -1: unknown
  std::int32_t world_size;    // 0: not told
  std::int32_t nccl_version;  // as ncclGetVersion gives it; 0: unknown
  std::uint32_t sample_ppm;   // share of calls whose GPU time is taken, parts per million
  char host[64];              // texts end in zeros
  char plugin_version[32];
  char mode[16];
  char job[64];
  char fingerprint[208];
  std::uint8_t padding[64];
  std::uint64_t checksum;  // fnv1a over the bytes before it
};
struct CallsEntry {
  CallRecord record;
  std::uint32_t dropped;   // records lost since the entry before: no room
  std::uint32_t checksum;  // low half of fnv1a over the bytes before it
};
static_assert(sizeof(Header) == 512 && sizeof(CallsEntry) == 80, "the file's, byte for byte");
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the file's numbers are little-endian");

constexpr std::uint32_t kFilesKept = 8;
constexpr std::uint64_t kDefaultMaxMib = 256, kLargestMaxMib = 1U << 20;

int g_directory = -1;
int g_file = -1;
std::uint64_t g_file_bytes = 0, g_max_file_bytes = 0;
Header g_header;  // of the next file

/// Bytes before the checksum, which comes last.
template <typename Struct>
std::uint64_t checksum_of(const Struct& value) noexcept {
  return fnv1a(&value, sizeof value - sizeof value.checksum);
}

/// What a job that has closed a standard descriptor prints must not come into a file.
int above_standard(int descriptor) noexcept {
  if (descriptor < 0 || descriptor > 2) return descriptor;
  const int moved = fcntl(descriptor, F_DUPFD_CLOEXEC, 3);
  close(descriptor);
  return moved;
}

bool begin_file() noexcept {
  static char names[kFilesKept][160];
  char (&name)[160] = names[g_header.number % kFilesKept];
  if (g_file >= 0) close(g_file);
  if (name[0] != '\0') unlinkat(g_directory, name, 0);  // the oldest
  char rank[16] = "x";
  if (g_header.world_rank >= 0) std::snprintf(rank, sizeof rank, "%d", g_header.world_rank);
  std::snprintf(name, sizeof name, "calls-%.63s-%d-r%s-%04u.dcc", g_header.host, g_header.pid, rank,
                g_header.number);
  constexpr int kNew = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
  g_file = above_standard(openat(g_directory, name, kNew, 0644));
  if (g_file < 0) return false;
  g_header.created_ns = ns_of(CLOCK_REALTIME);
  g_header.checksum = checksum_of(g_header);
  g_file_bytes = sizeof g_header;
  if (write(g_file, &g_header, sizeof g_header) != sizeof g_header) {
    unlinkat(g_directory, name, 0);
    return false;
  }
  ++g_header.number;
  return true;
}

/// False when the disk is full, or the file system says no: then the file ends where its last whole
/// entry does, and nothing may be written any more.
bool write_entries(const CallsEntry* entries, std::size_t count) noexcept {
  constexpr std::size_t kBytes = sizeof *entries;
  while (count > 0) {
    if (g_file_bytes + kBytes > g_max_file_bytes && !begin_file()) return false;
    const std::size_t wanted = std::min(count, (g_max_file_bytes - g_file_bytes) / kBytes);
    // One call: all signals are blocked here, so it comes back short when the disk is full alone.
    const ssize_t put = write(g_file, entries, wanted * kBytes);
    const std::size_t whole = put > 0 ? static_cast<std::size_t>(put) / kBytes : 0;
    g_file_bytes += whole * kBytes;
    if (whole < wanted) {
      // Every reader would report the torn entry; when even this fails, they will.
      if (ftruncate(g_file, static_cast<off_t>(g_file_bytes)) != 0) errno = 0;
      return false;
    }
    entries += whole;
    count -= whole;
  }
  return true;
}

template <std::size_t size>
void copy(const char* from, char (&text)[size]) noexcept {
  std::snprintf(text, size, "%s", from);
}

/// What the headers say of the process.
void fill_header(std::uint32_t sample_ppm, ncclDebugLogger_t logger) noexcept {
  const char* library = nullptr;
  g_header.world_rank = world_rank();
  g_header.nccl_version = nccl_version_of(logger, &library);
  g_header.sample_ppm = sample_ppm;
  g_header.pid = getpid();
  const char* job = value_of("SLURM_JOB_ID", value_of("TORCHELASTIC_RUN_ID", ""));
  copy(kPluginVersion, g_header.plugin_version);
  copy(value_of("DYNAMICCL_MODE", "observe"), g_header.mode);
  copy(value_of("DYNAMICCL_JOB_ID", job), g_header.job);
  copy(value_of("DYNAMICCL_MACHINE", ""), g_header.fingerprint);
  char (&host)[sizeof g_header.host] = g_header.host;
  if (gethostname(host, sizeof host - 1) != 0) copy("unknown", host);
}

// ---- From NCCL's threads to the one that writes

/// A ring; when it is full, records are dropped and counted: nobody who calls is ever held up. Not
/// two buffers in turn: what the writer's core has just read takes twice as long to fill.
constexpr std::uint64_t kMost = 16'384;  // at 100,000 calls/s: 160 ms
CallsEntry g_entries[kMost];
Mutex g_mutex;  // of what follows
std::uint64_t g_head = 0, g_tail = 0;
std::uint32_t g_dropped = 0;
std::atomic<int> g_communicators{0};
std::atomic<bool> g_writes{false};

/// It polls: waking it for each record would cost whoever calls a collective a system call.
void* write_records(void*) noexcept {
  constexpr std::uint64_t kBusyPauseNs = 2'000'000, kIdlePauseNs = 16'000'000;
  prctl(PR_SET_NAME, "dynamiccl-calls");
  bool is_broken = false;
  for (std::uint64_t pause_ns = kBusyPauseNs, tail = 0, head = 0;; sleep_ns(pause_ns)) {
    {
      const Lock lock(&g_mutex);
      g_tail = tail;
      head = g_head;
    }
    pause_ns = head > tail ? kBusyPauseNs : std::min(2 * pause_ns, kIdlePauseNs);
    while (tail < head) {
      CallsEntry* const first = g_entries + tail % kMost;
      const std::size_t count = std::min(head - tail, kMost - tail % kMost);
      for (std::size_t i = 0; i < count; ++i) {
        first[i].checksum = static_cast<std::uint32_t>(checksum_of(first[i]));
      }
      is_broken = is_broken || !write_entries(first, count);
      tail += count;
    }
  }
}

/// The thread that writes lives as long as the process, with all signals blocked, so that none of
/// the job's handlers runs on it. False when the system refuses.
bool start_writing() noexcept {
  // glibc takes the process's static thread-local memory, some hundred KiB with many libraries,
  // from each thread's stack. As much as its default: only pages that are used take memory.
  constexpr std::size_t kStackBytes = 8 * 1024 * 1024;
  pthread_attr_t attributes;
  if (pthread_attr_init(&attributes) != 0) return false;
  pthread_attr_setstacksize(&attributes, kStackBytes);
  sigset_t all, before;
  sigfillset(&all);
  sigprocmask(SIG_SETMASK, &all, &before);  // on Linux: of the calling thread, and inherited
  pthread_t thread;
  const int result = pthread_create(&thread, &attributes, write_records, nullptr);
  sigprocmask(SIG_SETMASK, &before, nullptr);
  pthread_attr_destroy(&attributes);
  if (result == 0) pthread_detach(thread);
  return result == 0;
}

}  // namespace

const char* Recorder::acquire(std::uint32_t sample_ppm, ncclDebugLogger_t logger) noexcept {
  g_communicators.fetch_add(1);
  static Mutex mutex;
  const Lock lock(&mutex);
  const char* directory = value_of("DYNAMICCL_CALLS_DIR");
  if (g_writes.load() || directory == nullptr) return nullptr;
  std::uint64_t mib = 0;
  const bool is_told = parse_number(value_of("DYNAMICCL_CALLS_MAX_MIB"), &mib);
  if (!is_told || mib > kLargestMaxMib) mib = kDefaultMaxMib;
  g_max_file_bytes = (std::max<std::uint64_t>(mib, 1) << 20) / kFilesKept;
  g_file_bytes = g_max_file_bytes;  // the first file is yet to come
  fill_header(sample_ppm, logger);
  mkdir(directory, 0700);  // if only its last part is missing; no link is followed to it
  g_directory = open(directory, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  const char* problem = why_not_ours(g_directory, S_IFDIR);
  if (problem == nullptr && !start_writing()) problem = "its thread cannot be started";
  g_writes.store(problem == nullptr);
  if (problem != nullptr) close(g_directory);
  return problem;
}

void Recorder::release() noexcept {
  if (g_communicators.fetch_sub(1) > 1 || !g_writes.load()) return;
  const auto is_all_written = [] {
    const Lock lock(&g_mutex);
    return g_tail == g_head;
  };
  wait_until(is_all_written);
}

bool Recorder::is_on() noexcept { return g_writes.load(std::memory_order_relaxed); }

void Recorder::push(const CallRecord& record) noexcept {
  if (!is_on()) return;
  const Lock lock(&g_mutex);
  if (g_head - g_tail == kMost) {
    ++g_dropped;
    return;
  }
  g_entries[g_head++ % kMost] = {record, g_dropped, 0};
  g_dropped = 0;
}

}  // namespace dynamiccl
