// The thread polls every few milliseconds: waking it for each record would cost a system call.
#include "profiler/recorder.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include "identity/environment.h"
#include "identity/fingerprint.h"
#include "platform/loaded_nccl.h"
#include "platform/threads.h"
#include "vocabulary.h"

namespace dynamiccl {
namespace {

// At 100,000 calls/s these hold 160 ms and 40 ms. Files are written by whoever has a slow disk.
constexpr std::size_t kCellsForFiles = 1U << 14;
constexpr std::size_t kCellsForSink = 1U << 12;
constexpr std::uint64_t kBusyPauseNs = 2'000'000;
constexpr std::uint64_t kIdlePauseNs = 16'000'000;
constexpr std::uint64_t kDefaultMaxMib = 256;
constexpr std::uint64_t kLargestMaxMib = 1U << 20;
constexpr std::size_t kBatch = 256;

/// State shared by the thread and those who start and stop it.
struct State {
  Mutex mutex;  // of everything below but what says otherwise
  int communicators = 0;
  bool is_running = false;
  bool is_stopping = false;
  bool is_abandoned = false;  // its thread hangs in the file system
  pthread_t thread = {};
  CallsFacts facts = {};
  CallsFiles files;  // the thread's while it runs

  Mutex sink_mutex;  // held while the sink runs
  Recorder::Sink sink = nullptr;
  void* sink_user = nullptr;

  std::atomic<bool> stop{false};
  std::atomic<bool> has_stopped{false};
  std::atomic<std::uint64_t> taken{0};
};

// Made when the library is loaded and never destroyed: at exit other threads may still be running.
alignas(State) unsigned char g_memory[sizeof(State)];

__attribute__((constructor)) void make_state() { new (g_memory) State; }

State& state() noexcept { return *std::launder(reinterpret_cast<State*>(g_memory)); }

/// The number that `text` is, when it is one of at most `largest`; else `fallback`.
std::int64_t number_in(const char* text, std::int64_t largest, std::int64_t fallback) noexcept {
  if (text == nullptr) return fallback;
  std::int64_t number = 0;
  for (; *text != '\0'; ++text) {
    if (*text < '0' || *text > '9') return fallback;
    number = number * 10 + (*text - '0');
    if (number > largest) return fallback;
  }
  return number;
}

std::int32_t first_number(const char* const* variables, std::int32_t fallback) noexcept {
  for (; *variables != nullptr; ++variables) {
    const char* text = value_of(*variables);
    if (text != nullptr) {
      return static_cast<std::int32_t>(number_in(text, 0x7fffffff, fallback));
    }
  }
  return fallback;
}

template <std::size_t size>
void copy_text(char (&to)[size], const char* from) noexcept {
  std::memset(to, 0, size);
  if (from != nullptr) std::memcpy(to, from, std::min(std::strlen(from), size - 1));
}

/// Fills in what the environment says; the rest is told by set_facts and set_sampling.
void read_facts(CallsFacts* facts) noexcept {
  static const char* const kRank[] = {"RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "PMI_RANK",
                                      nullptr};
  static const char* const kSize[] = {"WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS",
                                      "PMI_SIZE", nullptr};
  facts->world_rank = first_number(kRank, -1);
  facts->world_size = first_number(kSize, 0);
  const char* job = value_of("DYNAMICCL_JOB_ID");
  if (job == nullptr) job = value_of("SLURM_JOB_ID");
  if (job == nullptr) job = value_of("TORCHELASTIC_RUN_ID");
  copy_text(facts->job, job);
  char host[sizeof facts->host] = {};
  if (gethostname(host, sizeof host - 1) != 0) host[0] = '\0';
  for (char& letter : host) {
    const bool is_plain = (letter >= 'a' && letter <= 'z') || (letter >= 'A' && letter <= 'Z') ||
                          (letter >= '0' && letter <= '9') || letter == '.' || letter == '-';
    if (letter != '\0' && !is_plain) letter = '_';
  }
  copy_text(facts->host, host[0] != '\0' ? host : "unknown");
}

/// Passes on all records in the ring; returns their number.
std::size_t drain(State* shared, Ring* ring, std::uint64_t* dropped_before) noexcept {
  CallRecord batch[kBatch];
  std::size_t all = 0;
  std::size_t count = kBatch;
  while (count == kBatch) {
    for (count = 0; count < kBatch && ring->pop(&batch[count]); ++count) {
    }
    {
      const Lock lock(&shared->sink_mutex);
      for (std::size_t i = 0; i < count && shared->sink != nullptr; ++i) {
        shared->sink(shared->sink_user, batch[i]);
      }
    }
    if (shared->files.is_open() && count > 0) {
      CallsFacts facts;
      {
        const Lock lock(&shared->mutex);
        facts = shared->facts;
      }
      for (std::size_t i = 0; i < count; ++i) {
        const std::uint64_t dropped = ring->dropped();
        const std::uint64_t since = std::min<std::uint64_t>(dropped - *dropped_before, 0xffffffff);
        *dropped_before = dropped;
        shared->files.append(batch[i], static_cast<std::uint32_t>(since), facts);
      }
    }
    shared->taken.fetch_add(count, std::memory_order_relaxed);
    all += count;
  }
  if (all > 0) shared->files.flush();
  return all;
}

/// Looking at the machine can take milliseconds, so it is done here and not at a communicator's
/// creation.
void look_at_machine(State* shared) noexcept {
  {
    const Lock lock(&shared->mutex);
    if (shared->facts.fingerprint[0] != '\0') return;
  }
  char fingerprint[kFingerprintBytes];
  if (!take_fingerprint(loaded_nccl_version(), fingerprint)) return;
  const char* nccl = std::strstr(fingerprint, ";nccl=");
  Recorder::set_facts(kPluginVersion, fingerprint, nccl != nullptr ? std::atoi(nccl + 6) : 0);
}

void* run(void* argument) noexcept {
  auto* ring = static_cast<Ring*>(argument);
  State& shared = state();
  look_at_machine(&shared);
  std::uint64_t dropped_before = ring->dropped();
  std::uint64_t pause_ns = kBusyPauseNs;
  while (true) {
    // Asked before draining: what was pushed before the stop is then in the ring.
    const bool is_last = shared.stop.load(std::memory_order_acquire);
    const std::size_t count = drain(&shared, ring, &dropped_before);
    if (is_last) break;
    pause_ns = count > 0 ? kBusyPauseNs : std::min(2 * pause_ns, kIdlePauseNs);
    sleep_ns(pause_ns);
  }
  shared.files.close();
  shared.has_stopped.store(true, std::memory_order_release);
  return nullptr;
}

}  // namespace

std::atomic<bool> Recorder::s_on{false};
std::atomic<Ring*> Recorder::s_ring{nullptr};

namespace {

/// With the mutex held: start the thread if there is a use for it. Null, or why there is none.
const char* start(State* shared, std::atomic<Ring*>* published, std::atomic<bool>* on) noexcept {
  if (shared->is_running || shared->is_abandoned || shared->communicators == 0) return nullptr;
  const char* problem = nullptr;
  const char* directory = value_of("DYNAMICCL_CALLS_DIR");
  if (directory != nullptr) {
    const auto mib =
        static_cast<std::uint64_t>(number_in(value_of("DYNAMICCL_CALLS_MAX_MIB"), kLargestMaxMib,
                                             static_cast<std::int64_t>(kDefaultMaxMib)));
    read_facts(&shared->facts);
    problem = shared->files.open(directory, std::max<std::uint64_t>(mib, 1) << 20);
  }
  bool has_sink;
  {
    const Lock lock(&shared->sink_mutex);
    has_sink = shared->sink != nullptr;
  }
  if (!shared->files.is_open() && !has_sink) return problem;
  Ring* ring = published->load(std::memory_order_relaxed);
  if (ring == nullptr) {
    ring = Ring::create(shared->files.is_open() ? kCellsForFiles : kCellsForSink);
    if (ring == nullptr) return "memory is short";
    published->store(ring, std::memory_order_release);
  }
  shared->stop.store(false, std::memory_order_relaxed);
  shared->has_stopped.store(false, std::memory_order_relaxed);
  if (!start_thread(run, ring, "dynamiccl-calls", &shared->thread)) {
    shared->files.close();
    return "its thread cannot be started";
  }
  shared->is_running = true;
  on->store(true, std::memory_order_release);
  return problem;
}

}  // namespace

const char* Recorder::acquire() noexcept {
  if (in_forked_child()) return nullptr;
  State& shared = state();
  const Lock lock(&shared.mutex);
  ++shared.communicators;
  return start(&shared, &s_ring, &s_on);
}

void Recorder::release() noexcept {
  if (in_forked_child()) return;
  State& shared = state();
  pthread_t thread;
  {
    const Lock lock(&shared.mutex);
    if (shared.communicators == 0 || --shared.communicators > 0) return;
    if (!shared.is_running || shared.is_stopping) return;
    shared.is_stopping = true;
    s_on.store(false, std::memory_order_relaxed);
    shared.stop.store(true, std::memory_order_release);
    thread = shared.thread;
  }
  // Without the mutex: the thread takes it to read the facts.
  const std::uint64_t limit_ns = monotonic_ns() + kStopLimitNs;
  while (!shared.has_stopped.load(std::memory_order_acquire) && monotonic_ns() < limit_ns) {
    sleep_ns(kBusyPauseNs / 4);
  }
  const bool has_stopped = shared.has_stopped.load(std::memory_order_acquire);
  if (has_stopped) join_thread(thread);
  const Lock lock(&shared.mutex);
  shared.is_running = shared.is_stopping = false;
  shared.is_abandoned = !has_stopped;
  start(&shared, &s_ring, &s_on);  // for a communicator that has come meanwhile
}

void Recorder::set_sink(Sink sink, void* user) noexcept {
  if (in_forked_child()) return;
  State& shared = state();
  {
    const Lock lock(&shared.sink_mutex);
    shared.sink = sink;
    shared.sink_user = user;
  }
  const Lock lock(&shared.mutex);
  if (sink != nullptr) start(&shared, &s_ring, &s_on);
}

void Recorder::set_facts(const char* plugin_version, const char* fingerprint,
                         std::int32_t nccl_version) noexcept {
  if (in_forked_child()) return;
  State& shared = state();
  const Lock lock(&shared.mutex);
  copy_text(shared.facts.plugin_version, plugin_version);
  copy_text(shared.facts.fingerprint, fingerprint);
  shared.facts.nccl_version = nccl_version;
}

void Recorder::set_sampling(std::uint32_t sample_ppm, const char* mode) noexcept {
  if (in_forked_child()) return;
  State& shared = state();
  const Lock lock(&shared.mutex);
  shared.facts.sample_ppm = sample_ppm;
  copy_text(shared.facts.mode, mode);
}

RecorderCounters Recorder::counters() noexcept {
  State& shared = state();
  const Ring* ring = s_ring.load(std::memory_order_acquire);
  return {shared.taken.load(std::memory_order_relaxed), ring != nullptr ? ring->dropped() : 0,
          shared.files.written(), shared.files.lost()};
}

}  // namespace dynamiccl
