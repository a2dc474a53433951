// A ring from NCCL's threads to one that writes the calls files; collect/calls.py reads them.
//
// A file is a header and then entries, each with a checksum of its own: a process may be killed
// while it writes. All numbers are little-endian. All writing is done with write(): a store into a
// mapped file on a full disk would be a signal.
#include "profiler/recorder.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <initializer_list>

#include "file.h"
#include "identity/communicator.h"
#include "identity/environment.h"
#include "platform/threads.h"
#include "vocabulary.h"

namespace dynamiccl {
namespace {

// ---- The ring

/// `turn` says whose the cell is: 2 x lap for the producer of that lap, one more for the consumer.
/// So memory full of zeros is an empty ring.
struct Cell {
  std::atomic<std::uint64_t> turn;
  CallRecord record;
};

/// A bounded queue from many threads to one, after D. Vyukov's. When it is full a record is dropped
/// and counted: whoever calls a collective is never held up. Its pages are taken when first used.
constexpr unsigned kRingBits = 14;  // at 100,000 calls/s: 160 ms
constexpr std::uint64_t kRingMask = (1U << kRingBits) - 1;
Cell g_cells[kRingMask + 1];
alignas(64) std::atomic<std::uint64_t> g_head{0};  // of the producers
alignas(64) std::atomic<std::uint64_t> g_dropped{0};
std::atomic<std::uint64_t> g_taken{0};

void put(const CallRecord& record) noexcept {
  std::uint64_t head = g_head.load(std::memory_order_relaxed);
  while (true) {
    Cell& cell = g_cells[head & kRingMask];
    const std::uint64_t ours = 2 * (head >> kRingBits);
    const std::uint64_t turn = cell.turn.load(std::memory_order_acquire);
    if (turn == ours) {
      if (!g_head.compare_exchange_weak(head, head + 1, std::memory_order_relaxed)) continue;
      cell.record = record;
      cell.turn.store(ours + 1, std::memory_order_release);
      return;
    }
    if (turn < ours) {  // still full of the lap before
      g_dropped.fetch_add(1, std::memory_order_relaxed);
      return;
    }
    head = g_head.load(std::memory_order_relaxed);  // another producer was faster
  }
}

/// The next record; false when there is none. `tail` is the consumer's.
bool take(std::uint64_t* tail, CallRecord* record) noexcept {
  Cell& cell = g_cells[*tail & kRingMask];
  const std::uint64_t filled = 2 * (*tail >> kRingBits) + 1;
  if (cell.turn.load(std::memory_order_acquire) != filled) return false;
  *record = cell.record;
  cell.turn.store(filled + 1, std::memory_order_release);
  ++*tail;
  return true;
}

// ---- The files

struct Header {
  std::uint8_t magic[8];
  std::uint32_t version;
  std::uint32_t header_bytes;
  std::uint32_t entry_bytes;
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
  std::uint32_t dropped;   // records lost since the entry before: the ring was full
  std::uint32_t checksum;  // low half of fnv1a over the bytes before it
};
static_assert(sizeof(Header) == 512 && sizeof(CallsEntry) == 80, "the file's, byte for byte");
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the file's numbers are little-endian");

constexpr std::size_t kBufferEntries = 800;
constexpr std::uint32_t kFilesKept = 8;
constexpr std::uint64_t kDefaultMaxMib = 256, kLargestMaxMib = 1U << 20;

/// Bytes before the checksum, which comes last.
template <typename Struct>
std::uint64_t checksum_of(const Struct& value) noexcept {
  return fnv1a(reinterpret_cast<const std::uint8_t*>(&value), sizeof value - sizeof value.checksum);
}

/// One writer, rotated, within a bound on disk. The thread's alone, once it runs; but for the
/// counters. Without constructor and destructor: at exit the thread may still be running.
struct CallsFiles {
  int directory;
  int file;
  bool has_file;
  bool is_broken;  // nothing is written any more
  std::uint64_t max_file_bytes;
  std::uint64_t file_bytes;  // of the latest file, in whole entries
  std::size_t buffered;      // entries
  std::atomic<std::uint64_t> written, lost;
  Header header;  // of the next file
  CallsEntry buffer[kBufferEntries];

  void append(const CallRecord& record, std::uint32_t dropped) noexcept;
  void flush() noexcept;
  bool begin_file() noexcept;
  void name_of(std::uint32_t number, char (&name)[160]) const noexcept;
};

CallsFiles g_files;

/// Opens the directory, and makes it when only its last part is missing; no link is followed to it.
/// Null on success, else why nothing will be written.
const char* open_directory(const char* path, int* descriptor) noexcept {
  mkdir(path, 0700);
  const int opened = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (opened < 0) {
    if (errno == ENOENT) return "there is no such directory";
    return errno == ENOTDIR ? "it is not a directory, or a symbolic link to one"
                            : "it cannot be opened";
  }
  const char* problem = why_not_ours(opened, S_IFDIR);
  if (problem == nullptr) {
    *descriptor = opened;
  } else {
    close(opened);
  }
  return problem;
}

/// Adds to a buffer that is written when it is full.
void CallsFiles::append(const CallRecord& record, std::uint32_t dropped) noexcept {
  if (has_file && file_bytes + (buffered + 1) * sizeof(CallsEntry) > max_file_bytes) {
    flush();
    close(file);
    has_file = false;
  }
  if (is_broken || (!has_file && !begin_file())) {
    lost.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  CallsEntry& entry = buffer[buffered++];
  entry = {record, dropped, 0};
  entry.checksum = static_cast<std::uint32_t>(checksum_of(entry));
  if (buffered == kBufferEntries) flush();
}

/// When the disk is full, or the file system says no, the file ends where its last whole entry
/// does, and nothing is written any more.
void CallsFiles::flush() noexcept {
  const std::size_t wanted = buffered;
  buffered = 0;
  if (wanted == 0) return;
  // One call: all signals are blocked here, so it comes back short when the disk is full alone.
  const ssize_t put = write(file, buffer, wanted * sizeof(CallsEntry));
  const std::size_t whole = put > 0 ? static_cast<std::size_t>(put) / sizeof(CallsEntry) : 0;
  file_bytes += whole * sizeof(CallsEntry);
  written.fetch_add(whole, std::memory_order_relaxed);
  if (whole == wanted) return;
  lost.fetch_add(wanted - whole, std::memory_order_relaxed);
  is_broken = true;
  // Every reader would report the torn entry; when even this fails, they will.
  if (ftruncate(file, static_cast<off_t>(file_bytes)) != 0) errno = 0;
}

bool CallsFiles::begin_file() noexcept {
  char name[160];
  if (header.number >= kFilesKept) {
    name_of(header.number - kFilesKept, name);
    unlinkat(directory, name, 0);
  }
  name_of(header.number, name);
  file = openat(directory, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644);
  header.created_ns = realtime_ns();
  header.checksum = checksum_of(header);
  file_bytes = sizeof header;
  has_file = file >= 0 && write(file, &header, sizeof header) == sizeof header;
  ++header.number;
  is_broken = !has_file;
  if (file >= 0 && is_broken) {
    unlinkat(directory, name, 0);
    close(file);
  }
  return has_file;
}

void CallsFiles::name_of(std::uint32_t number, char (&name)[160]) const noexcept {
  char rank[16] = "x";
  if (header.world_rank >= 0) std::snprintf(rank, sizeof rank, "%d", header.world_rank);
  std::snprintf(name, sizeof name, "calls-%.63s-%d-r%s-%04u.dcc", header.host, header.pid, rank,
                number);
}

// ---- What a header says of the process

/// The first of the variables that is set, else "".
const char* first_of(std::initializer_list<const char*> variables) noexcept {
  for (const char* variable : variables) {
    if (const char* text = value_of(variable)) return text;
  }
  return "";
}

void read_environment(std::uint32_t sample_ppm, Header* header) noexcept {
  constexpr std::uint8_t kMagicOfCalls[8] = {'D', 'C', 'C', 'A', 'L', 'L', 'S', 0};
  std::memcpy(header->magic, kMagicOfCalls, sizeof header->magic);
  header->version = 1;
  header->header_bytes = sizeof(Header);
  header->entry_bytes = sizeof(CallsEntry);
  header->pid = getpid();
  header->sample_ppm = sample_ppm;
  std::uint64_t rank = 0;
  const char* const text = first_of({"RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "PMI_RANK"});
  const bool is_rank = parse_number(text, &rank) && rank <= 0x7fffffff;
  header->world_rank = is_rank ? static_cast<std::int32_t>(rank) : -1;
  const char* const mode = first_of({"DYNAMICCL_MODE"});
  std::snprintf(header->mode, sizeof header->mode, "%s", mode[0] != '\0' ? mode : "observe");
  std::snprintf(header->job, sizeof header->job, "%s",
                first_of({"DYNAMICCL_JOB_ID", "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"}));
  std::snprintf(header->plugin_version, sizeof header->plugin_version, "%s", kPluginVersion);
  std::snprintf(header->fingerprint, sizeof header->fingerprint, "%s",
                first_of({"DYNAMICCL_MACHINE"}));
  if (gethostname(header->host, sizeof header->host - 1) != 0) std::strcpy(header->host, "unknown");
}

// ---- The thread

constexpr std::uint64_t kBusyPauseNs = 2'000'000;
constexpr std::uint64_t kIdlePauseNs = 16'000'000;

Mutex g_mutex;  // of these two
int g_communicators = 0;
bool g_has_thread = false;
std::atomic<std::uint64_t> g_flushes_wanted{0}, g_flushes_done{0};

/// It polls: waking it for each record would cost whoever calls a collective a system call.
void* write_records(void*) noexcept {
  prctl(PR_SET_NAME, "dynamiccl-calls");
  std::uint64_t tail = 0, dropped_before = 0, pause_ns = kBusyPauseNs;
  while (true) {
    // Asked before: what was pushed until then is in the ring.
    const std::uint64_t wanted = g_flushes_wanted.load(std::memory_order_acquire);
    CallRecord record;
    bool is_any = false;
    for (; take(&tail, &record); is_any = true) {
      const std::uint64_t dropped = g_dropped.load(std::memory_order_relaxed);
      const std::uint64_t since = std::min<std::uint64_t>(dropped - dropped_before, 0xffffffff);
      dropped_before = dropped;
      g_files.append(record, static_cast<std::uint32_t>(since));
    }
    g_files.flush();
    g_flushes_done.store(wanted, std::memory_order_release);
    pause_ns = is_any ? kBusyPauseNs : std::min(2 * pause_ns, kIdlePauseNs);
    sleep_ns(pause_ns);
  }
}

}  // namespace

std::atomic<bool> Recorder::s_writes{false};
Hook<const CallRecord&> Recorder::s_sink;

const char* Recorder::acquire(std::uint32_t sample_ppm, ncclDebugLogger_t logger) noexcept {
  if (in_forked_child()) return nullptr;
  const Lock lock(&g_mutex);
  ++g_communicators;
  const char* directory = value_of("DYNAMICCL_CALLS_DIR");
  if (g_has_thread || directory == nullptr) return nullptr;
  if (const char* problem = open_directory(directory, &g_files.directory)) return problem;
  std::uint64_t mib = kDefaultMaxMib;
  const char* text = value_of("DYNAMICCL_CALLS_MAX_MIB");
  if (!parse_number(text, &mib) || mib > kLargestMaxMib) mib = kDefaultMaxMib;
  g_files.max_file_bytes = (std::max<std::uint64_t>(mib, 1) << 20) / kFilesKept;
  read_environment(sample_ppm, &g_files.header);
  const char* library = nullptr;
  g_files.header.nccl_version = nccl_version_of(logger, &library);
  if (!start_thread(write_records)) {
    close(g_files.directory);
    return "its thread cannot be started";
  }
  g_has_thread = true;
  s_writes.store(true, std::memory_order_relaxed);
  return nullptr;
}

void Recorder::release() noexcept {
  if (in_forked_child()) return;
  {
    const Lock lock(&g_mutex);
    if (g_communicators == 0 || --g_communicators > 0 || !g_has_thread) return;
  }
  const std::uint64_t wanted = g_flushes_wanted.fetch_add(1) + 1;
  const std::uint64_t limit_ns = monotonic_ns() + kFlushLimitNs;
  while (g_flushes_done.load(std::memory_order_acquire) < wanted && monotonic_ns() < limit_ns) {
    sleep_ns(kBusyPauseNs / 4);
  }
}

void Recorder::push(const CallRecord& record) noexcept {
  g_taken.fetch_add(1, std::memory_order_relaxed);
  s_sink.call(record);
  if (s_writes.load(std::memory_order_relaxed)) put(record);
}

RecorderCounters Recorder::counters() noexcept {
  return {g_taken.load(std::memory_order_relaxed), g_dropped.load(std::memory_order_relaxed),
          g_files.written.load(std::memory_order_relaxed),
          g_files.lost.load(std::memory_order_relaxed)};
}

}  // namespace dynamiccl
