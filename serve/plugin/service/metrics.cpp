// The text format of Prometheus (exposition format 0.0.4).
#include "service/metrics.h"

#include <unistd.h>

#include <cinttypes>
#include <cstdarg>
#include <cstdio>

#include "agreement/guard.h"
#include "file.h"
#include "history/recorder.h"
#include "service/samples.h"

namespace dynamiccl {
namespace {

constexpr std::uint64_t kEveryNs = 1'000'000'000;

/// Text of bounded length.
struct Page {
  char text[32 * 1024] = {};
  std::size_t length = 0;

  __attribute__((format(printf, 2, 3))) void add(const char* format, ...) noexcept;
};

void Page::add(const char* format, ...) noexcept {
  va_list arguments;
  va_start(arguments, format);
  const int written = std::vsnprintf(text + length, sizeof text - length, format, arguments);
  va_end(arguments);
  if (written > 0 && length + static_cast<std::size_t>(written) < sizeof text) {
    length += static_cast<std::size_t>(written);
  } else {
    text[length] = '\0';  // only whole lines
  }
}

}  // namespace

void Metrics::start(const Settings& settings, const Job& job) noexcept {
  if (settings.metrics_dir == nullptr) return;
  const long name = job.world_rank >= 0 ? job.world_rank : getpid();
  std::snprintf(path_, sizeof path_, "%s/dynamiccl-%016" PRIx64 "-%ld.prom", settings.metrics_dir,
                job.id, name);
  std::snprintf(new_path_, sizeof new_path_, "%s.new", path_);
}

void Metrics::write(const Agreement* agreements, std::uint64_t now_ns) noexcept {
  if (path_[0] == '\0' || now_ns < write_at_ns_) return;
  write_at_ns_ = now_ns + kEveryNs;
  static Page page;
  page.length = 0;
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
  };
  for (const auto& metric : kHelp) {
    page.add("# HELP %s %s.\n# TYPE %s %s\n", metric[0], metric[2], metric[0], metric[1]);
    for (const Agreement* each = agreements; each != nullptr; each = each->next) {
      if (!each->begun) continue;
      page.add("%s{comm=\"%016" PRIx64 "\",rank=\"%d\",ranks=\"%d\",nodes=\"%d\"} %" PRIu64 "\n",
               metric[0], each->place().comm_id, each->place().rank, each->place().num_ranks,
               each->place().num_nodes, each->metric(static_cast<int>(&metric - kHelp)));
    }
  }
  const RecorderCounters counters = Recorder::counters();
  page.add("# TYPE dynamiccl_records counter\ndynamiccl_records %" PRIu64 "\n", counters.taken);
  page.add("# TYPE dynamiccl_records_dropped counter\ndynamiccl_records_dropped %" PRIu64 "\n",
           counters.dropped + counters.lost);
  page.add("# TYPE dynamiccl_times_lost counter\ndynamiccl_times_lost %" PRIu64 "\n",
           samples_lost());
  {
    const File file(new_path_, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW);
    if (!file.is_open()) return;
    if (::write(file.descriptor(), page.text, page.length) != static_cast<ssize_t>(page.length)) {
      return;
    }
  }
  rename(new_path_, path_);
}

}  // namespace dynamiccl
