// The text format of Prometheus (exposition format 0.0.4).
#include "adaptive/service/metrics.h"

#include <unistd.h>

#include <cinttypes>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>

#include "adaptive/agreement/guard.h"
#include "adaptive/service/files.h"
#include "adaptive/service/samples.h"
#include "profiler/recorder.h"

namespace dynamiccl {
namespace {

constexpr std::uint64_t kEveryNs = 1'000'000'000;

/// A growing text buffer.
class Lines {
 public:
  ~Lines() { std::free(text_); }

  __attribute__((format(printf, 2, 3))) void add(const char* format, ...) noexcept;
  /// The text, to be freed by the caller; null: out of memory.
  char* take(std::size_t* size) noexcept {
    *size = length_;
    char* text = is_whole_ ? text_ : nullptr;
    if (is_whole_) text_ = nullptr;
    return text;
  }

 private:
  static constexpr std::size_t kMaxLineBytes = 512;

  char* text_ = nullptr;
  std::size_t length_ = 0;
  std::size_t capacity_ = 0;
  bool is_whole_ = true;
};

void Lines::add(const char* format, ...) noexcept {
  if (length_ + kMaxLineBytes > capacity_) {
    const std::size_t more = 2 * capacity_ + 8 * kMaxLineBytes;
    auto* text = static_cast<char*>(std::realloc(text_, more));
    if (text == nullptr) {
      is_whole_ = false;
      return;
    }
    text_ = text;
    capacity_ = more;
  }
  va_list arguments;
  va_start(arguments, format);
  const int written = std::vsnprintf(text_ + length_, kMaxLineBytes, format, arguments);
  va_end(arguments);
  if (written < 0 || static_cast<std::size_t>(written) >= kMaxLineBytes) {
    is_whole_ = false;
  } else {
    length_ += static_cast<std::size_t>(written);
  }
}

}  // namespace

void Metrics::start(const Settings& settings, const Job& job) noexcept {
  if (settings.metrics_dir == nullptr) return;
  const long name = job.world_rank >= 0 ? job.world_rank : getpid();
  std::snprintf(path_, sizeof path_, "%s/dynamiccl-%016" PRIx64 "-%ld.prom", settings.metrics_dir,
                job.id, name);
}

void Metrics::write(const Agreement* agreements, std::uint64_t now_ns, Files* files) noexcept {
  if (path_[0] == '\0' || now_ns < write_at_ns_) return;
  write_at_ns_ = now_ns + kEveryNs;
  Lines lines;
  static constexpr const char* kHelp[][3] = {
      {"dynamiccl_calls", "counter", "Collectives asked about"},
      {"dynamiccl_table", "gauge", "Number of the table in force; 0: NCCL's own choice"},
      {"dynamiccl_ended", "gauge", "1: nothing more will be agreed"},
      {"dynamiccl_off", "gauge", "1: a kill file was seen"},
      {"dynamiccl_waiting", "gauge", "1: a call waits for a decision"},
      {"dynamiccl_uncountable", "gauge", "1: calls overlapped, so that they cannot be counted"},
      {"dynamiccl_proposals_agreed", "counter", "Tables and probes that were agreed (leader)"},
      {"dynamiccl_timed_calls", "counter", "Calls of which all ranks told the time (leader)"},
      {"dynamiccl_withdrawn", "gauge", "Choices that the guard withdrew (leader)"},
      {"dynamiccl_captured_calls", "counter",
       "Calls captured in CUDA graphs, which keep the choice of that moment"},
      {"dynamiccl_waited_us", "counter", "Time that calls waited at stops"},
  };
  for (const auto& metric : kHelp) {
    lines.add("# HELP %s %s.\n# TYPE %s %s\n", metric[0], metric[2], metric[0], metric[1]);
    for (const Agreement* each = agreements; each != nullptr; each = each->next) {
      if (!each->begun) continue;
      lines.add("%s{comm=\"%016" PRIx64 "\",rank=\"%d\",ranks=\"%d\",nodes=\"%d\"} %" PRIu64 "\n",
                metric[0], each->place().comm_id, each->place().rank, each->place().num_ranks,
                each->place().num_nodes, each->metric(static_cast<int>(&metric - kHelp)));
    }
  }
  const RecorderCounters counters = Recorder::counters();
  lines.add("# TYPE dynamiccl_records counter\ndynamiccl_records %" PRIu64 "\n", counters.taken);
  lines.add("# TYPE dynamiccl_records_dropped counter\ndynamiccl_records_dropped %" PRIu64 "\n",
            counters.dropped + counters.lost);
  lines.add("# TYPE dynamiccl_times_lost counter\ndynamiccl_times_lost %" PRIu64 "\n",
            samples_lost());
  std::size_t size = 0;
  char* text = lines.take(&size);
  if (text != nullptr) files->write(path_, text, size);
}

}  // namespace dynamiccl
