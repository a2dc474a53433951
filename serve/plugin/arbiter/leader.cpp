// Implementation of leader.h.
#include "arbiter/leader.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>

namespace dynamiccl {
namespace {

/// A probe takes so many calls; it ends at the first stop after them.
constexpr std::uint64_t kProbeCalls = 64;
/// Before a communicator's rate is known: NCCL's first calls connect, and take seconds.
constexpr std::uint64_t kFirstStop = 64, kFirstSpan = 64;
constexpr std::uint64_t kLeastSpan = 32, kMostSpan = 1'000'000;
/// Failed stops are tried again after this part of the time to the next one.
constexpr std::uint64_t kTriesOfInterval = 4;

double number_of(const char* variable, double fallback) {
  const char* text = std::getenv(variable);
  char* end = nullptr;
  const double number = text != nullptr ? std::strtod(text, &end) : -1.0;
  return text != nullptr && *end == '\0' && number >= 0.0 ? number : fallback;
}

}  // namespace

Leader::Leader()
    : look_ns_(static_cast<std::uint64_t>(
          1e9 * std::max(0.01, number_of("DYNAMICCL_LOOK_INTERVAL_S", 1.0)))),
      probe_calls_(static_cast<std::uint64_t>(number_of("DYNAMICCL_PROBE_CALLS", 6'400.0))),
      stop_share_(std::max(1e-6, number_of("DYNAMICCL_STOP_PERCENT", 0.1) / 100.0)) {
  const char* path = std::getenv("DYNAMICCL_KILL_FILE");
  if (path == nullptr) return;
  kill_file_ = path;
  kill_file_seen_ = -1;
  std::thread(&Leader::look, this).detach();  // as long as the worker
}

/// On a thread of its own: while a file server stalls, ranks wait for answers.
void Leader::look() {
  for (;;) {
    kill_file_seen_ = access(kill_file_.c_str(), F_OK) == 0 ? 1 : 0;
    std::this_thread::sleep_for(std::chrono::nanoseconds(look_ns_ / 2));
  }
}

void Leader::hear(const Vote& vote, const std::string& body) {
  Told told;
  if (body.size() < sizeof told) return;
  std::memcpy(&told, body.data(), sizeof told);
  Told& latest = groups_[vote.round.comm].latest;
  latest.lived_ns = std::max(latest.lived_ns, told.lived_ns);
  latest.waited_ns = std::max(latest.waited_ns, told.waited_ns);
  latest.in_force = told.in_force;
}

const char* Leader::propose(const Vote& first, Reply* question) {
  const int kill_file = kill_file_seen_;
  if (first.round.number == 0) {
    if (kill_file > 0) return "a kill file is there";
    if (kill_file < 0) return "whether a kill file is there is not known yet";
    if (!first.has_stops) return nullptr;
    groups_[first.round.comm] = Group{};
    question->next_stop = kFirstStop;
    question->span_calls = kFirstSpan;
    return nullptr;
  }
  Group& group = groups_[first.round.comm];
  const std::uint64_t call = first.fields[1];
  const Told& now = group.latest;

  const bool is_off = kill_file > 0;
  group.proposed = is_off ? InForce::kOwnChoice : InForce::kFirstTable;
  if (kill_file < 0) group.proposed = now.in_force;
  const bool is_probing = now.in_force == InForce::kOwnChoice;
  const bool may_probe = probe_calls_ > 0 && call >= group.probed_at + probe_calls_;
  if (!is_off && !is_probing && may_probe) {
    group.proposed = InForce::kOwnChoice;
    group.probed_at = call;
  }
  if (group.proposed != now.in_force) {
    const bool is_own = group.proposed == InForce::kOwnChoice;
    question->change = is_own ? Change::kOwnChoice : Change::kFirstTable;
  }

  // Of the time since the stop before, as far as this worker has seen it.
  const double lived_ns = static_cast<double>(now.lived_ns - group.lived_ns) + 1.0;
  const double calls_per_ns = static_cast<double>(call - std::min(call, group.calls)) / lived_ns;
  const double waited_ns =
      static_cast<double>(now.waited_ns - std::min(now.waited_ns, group.waited_ns));
  const double interval_ns = std::max(static_cast<double>(look_ns_), waited_ns / stop_share_);
  group.calls = call;
  group.lived_ns = now.lived_ns;
  group.waited_ns = now.waited_ns;
  std::uint64_t calls = static_cast<std::uint64_t>(calls_per_ns * interval_ns);
  const bool begins_probe = !is_off && group.proposed == InForce::kOwnChoice;
  if (begins_probe) calls = std::min(calls, kProbeCalls);
  question->span_calls = std::clamp(calls / kTriesOfInterval, kLeastSpan, kMostSpan);
  question->next_stop = call + std::max<std::uint64_t>(calls, 1);
  return nullptr;
}

void Leader::decided(const RoundKey& round, bool is_agreed) {
  const auto found = groups_.find(round.comm);
  if (found != groups_.end() && is_agreed) found->second.latest.in_force = found->second.proposed;
}

}  // namespace dynamiccl
