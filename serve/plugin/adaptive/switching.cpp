// Implementation of switching.h.
#include "adaptive/switching.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "file.h"
#include "identity/environment.h"
#include "platform/allocate.h"
#include "platform/threads.h"

namespace dynamiccl {
namespace {

constexpr std::uint64_t kNsPerMs = 1'000'000;
/// How long an abort waits for a call to leave, which looks every 10 ms.
constexpr int kLongestLeaveMs = 2'000;

Mutex g_mutex;
Switching* g_all = nullptr;
// Of the process, since one thread may call many communicators.
std::atomic<std::uint64_t> g_since_ns{0};
std::atomic<std::uint64_t> g_waited_ns{0};
std::atomic<bool> g_hears_times{false};

std::uint64_t stop_ppm() noexcept {
  const char* percent = value_of("DYNAMICCL_STOP_PERCENT");
  const int ppm = sample_ppm_of(percent != nullptr ? percent : "");
  return ppm >= 0 ? static_cast<std::uint64_t>(ppm) : 1'000;
}

}  // namespace

Switching::Switching(const Begin& begin) noexcept
    : begin_(begin),
      process_(getpid()),
      stop_ppm_(stop_ppm()),
      stops_(begin.communicator.comm_id, begin.table, begin.agreed) {}

Switching::~Switching() {
  deallocate(received_);
  deallocate(fresh_);
}

/// Of its records, on the threads of their events.
void Switching::be_described() noexcept {
  begin_.profiler->set_describe(
      [](void* user, CallRecord* record) { static_cast<Switching*>(user)->describe(record); },
      this);
}

Switching* Switching::create(const Begin& begin) noexcept {
  auto* made = allocate<Switching>(begin);
  if (made == nullptr) return nullptr;
  // Not under the mutex, which it takes; and for good.
  if (!g_hears_times.exchange(true)) Recorder::set_sink(take_time, nullptr);
  made->be_described();
  const Lock lock(&g_mutex);
  if (g_since_ns.load() == 0) g_since_ns.store(monotonic_ns());
  for (Switching* each = g_all; each != nullptr; each = each->next_) {
    if (each->begin_.communicator.comm_id != begin.communicator.comm_id) continue;
    for (Switching* one : {each, made}) one->end_voting("another communicator here has its id");
  }
  made->next_ = g_all;
  g_all = made;
  return made;
}

void Switching::end_voting_of_all() noexcept {
  const Lock lock(&g_mutex);
  for (Switching* each = g_all; each != nullptr; each = each->next_)
    each->end_voting("a communicator was shrunk: ids may repeat");
}

void Switching::retire(Switching* switching) noexcept {
  if (switching == nullptr) return;
  switching->leaves_.store(true);
  {
    const Lock lock(&g_mutex);
    Switching** link = &g_all;
    while (*link != nullptr && *link != switching) link = &(*link)->next_;
    if (*link != nullptr) *link = switching->next_;
  }
  for (int i = 0; i < kLongestLeaveMs && switching->inside_.load() > 0; ++i) sleep_ns(kNsPerMs);
  const bool is_described = !switching->begin_.profiler->set_describe(nullptr, nullptr);
  // Rather a leak than a call in freed memory.
  if (switching->inside_.load() == 0 && !is_described) deallocate(switching);
}

ncclResult_t Switching::answer(int collective, std::size_t size_bytes, CostTable costs,
                               int* num_channels) noexcept {
  CallMarks* marks = begin_.profiler->marks();
  const bool overlaps = inside_.fetch_add(1) != 0;
  // NCCL forbids calls of one communicator at the same time; they cannot be counted.
  if (overlaps) end_voting("calls of it overlap");
  if (!overlaps && stops_.is_due(marks->begins_group())) stop();
  const DecisionTable* table = stops_.table();
  const Entry* entry = table != nullptr && !has_failed_ && is_sound(costs)
                           ? lookup(*table, collective, size_bytes)
                           : nullptr;
  if (entry != nullptr) {
    choose(*entry, static_cast<int>(begin_.communicator.num_nodes), costs, num_channels);
  }
  const std::uint64_t told = marks->pass();
  if (!overlaps) stops_.answered(collective, size_bytes, told);
  const ncclResult_t result = has_failed_ ? ncclRemoteError : ncclSuccess;
  inside_.fetch_sub(1);
  return result;
}

/// The call is a stop: it goes on with a new table, or with the one in force.
void Switching::stop() noexcept {
  const std::uint64_t from_ns = monotonic_ns();
  const std::uint64_t lived_ns = from_ns - g_since_ns.load();
  const bool has_time = g_waited_ns.load() / 1'000 * 1'000'000 <= lived_ns / 1'000 * stop_ppm_;
  if (!has_time || leaves_.load() || getpid() != process_) return stop_failed();
  Vote vote;
  vote.nonce = draw();
  vote.num_ranks = static_cast<std::uint32_t>(begin_.communicator.num_ranks);
  vote.round.job = begin_.job;
  vote.rank = begin_.rank;
  vote.has_stops = true;
  stops_.write_vote(&vote);
  Reply proposal;
  const Verdict verdict = agree(vote, &proposal);
  g_waited_ns.fetch_add(monotonic_ns() - from_ns);
  if (verdict == Verdict::kTable) return agreed(proposal);
  deallocate(fresh_);
  fresh_ = nullptr;
  if (verdict == Verdict::kAbstain) return stop_failed();
  has_failed_ = true;
  stops_.end_voting();
  if (leaves_.load()) return;  // who aborts it knows
  say("this communicator must not be used: which table the other ranks use is not known");
}

void Switching::stop_failed() noexcept {
  stops_.failed();
  if (stops_.index() == Stops::kNever) end_voting("too many stops in a row came to nothing");
}

void Switching::end_voting(const char* why) noexcept {
  if (!stops_.end_voting()) return;
  char text[160];
  std::snprintf(text, sizeof text, "what is in force stays: %s", why);
  say(text);
}

void Switching::agreed(const Reply& proposal) noexcept {
  const bool is_new = proposal.change == Change::kNewTable;
  DecisionTable* before = received_;
  if (is_new) received_ = fresh_;
  fresh_ = nullptr;
  stops_.agreed(proposal, is_new ? received_ : nullptr);
  if (is_new) {
    // A thread that describes a record may look at the one before, or a call that should not be at
    // the same time; then it is kept.
    const bool is_seen = !begin_.profiler->set_describe(nullptr, nullptr) || inside_.load() > 1;
    if (!is_seen) deallocate(before);
    be_described();
  }
  if (proposal.change != Change::kNothing) {
    const bool is_own = stops_.table() == nullptr;
    table_number_.store(is_own ? 0 : static_cast<std::uint32_t>(stops_.number()));
    begin_.profiler->take_times(is_own);  // of all calls of a probe
  }
  const auto* words = reinterpret_cast<const std::uint8_t*>(proposal.reason);
  const std::uint64_t said = fnv1a(words, std::strlen(proposal.reason));
  if (proposal.reason[0] == '\0' || said == said_) return;
  said_ = said;
  say(proposal.reason);
}

/// `proposal` is the one that was confirmed.
Verdict Switching::agree(Vote vote, Reply* proposal) noexcept {
  const Limits limits = limits_of_job();
  Told told;
  told.lived_ns = monotonic_ns() - g_since_ns.load();
  told.waited_ns = g_waited_ns.load();
  told.num_nodes = static_cast<std::uint32_t>(begin_.communicator.num_nodes);
  told.nccl_version = static_cast<std::uint32_t>(begin_.nccl_version);
  told.in_force = stops_.table() == nullptr ? InForce::kOwnChoice : InForce::kTable;
  if (stops_.last_table() != nullptr) told.last_table = stops_.last_table()->checksum;
  std::uint8_t body[kMostBodyBytes];  // first what is told, then what comes
  std::memcpy(body, &told, sizeof told);
  std::size_t size = sizeof told;
  {
    const Lock lock(&g_mutex);
    const std::size_t count = num_times_ < kMostTimes ? num_times_ : kMostTimes;
    std::memcpy(body + size, times_, count * sizeof *times_);
    size += count * sizeof *times_;
    num_times_ = 0;
  }
  Exchange exchange;
  exchange.told = body;
  exchange.body = body;
  exchange.accepts = [](void* user, const Exchange& confirmed) {
    return static_cast<Switching*>(user)->accept(confirmed);
  };
  exchange.user = this;
  exchange.leaves = &leaves_;
  vote.body_bytes = static_cast<std::uint32_t>(size);
  const Verdict verdict =
      agree_by_arbiter(begin_.arbiter, vote, limits, stops_.patience_ms(limits), &exchange);
  *proposal = exchange.proposal;
  return verdict;
}

/// All that may fail of a proposal, before it is confirmed.
bool Switching::accept(const Exchange& exchange) noexcept {
  const Reply& proposal = exchange.proposal;
  if (proposal.change != Change::kNewTable) return proposal.body_bytes == 0;
  auto* table = allocate<DecisionTable>();
  if (table == nullptr) return false;
  const Communicator& communicator = begin_.communicator;
  const bool fits = decode_table(exchange.body, proposal.body_bytes, table) == nullptr &&
                    is_for(*table, communicator.num_nodes, communicator.num_ranks);
  if (!fits) {
    deallocate(table);
    return false;
  }
  leave_out_what_no_job_may_ask(begin_.nccl_version, table);
  fresh_ = table;
  return true;
}

/// On the thread of an event: of a graph's launches it is one of CUDA's.
void Switching::describe(CallRecord* record) const noexcept {
  const DecisionTable* table = stops_.table();
  const Entry* entry =
      table != nullptr ? lookup(*table, record->collective, record->size_bytes) : nullptr;
  record->table = table_number_.load();
  record->decided = entry != nullptr &&
                    (entry->algorithm == kAuto || entry->algorithm == record->algorithm) &&
                    (entry->protocol == kAuto || entry->protocol == record->protocol);
  if (table == nullptr) record->flags |= kFlagProbe;
}

/// From the recorder, on whatever thread.
void Switching::take_time(void*, const CallRecord& record) noexcept {
  if (record.start_ns == 0 || record.stop_ns <= record.start_ns) return;
  // Launches of a graph share a number, and run what was chosen at their capture.
  if ((record.flags & kFlagCaptured) != 0) return;
  const Lock lock(&g_mutex);
  for (Switching* each = g_all; each != nullptr; each = each->next_) {
    const Begin& begin = each->begin_;
    if (begin.communicator.comm_id != record.comm_id || begin.rank != record.rank) continue;
    CallTime& time = each->times_[each->num_times_++ % kMostTimes];
    time = {record.sequence,
            record.size_bytes,
            record.stop_ns - record.start_ns,
            record.collective,
            record.algorithm,
            record.protocol,
            record.num_channels,
            record.decided,
            record.flags,
            {}};
  }
}

void Switching::say(const char* what) const noexcept {
  dynamiccl::say(begin_.communicator, has_failed_ ? NCCL_LOG_WARN : NCCL_LOG_INFO,
                 "from call %llu: %s", static_cast<unsigned long long>(stops_.calls() + 1), what);
}

}  // namespace dynamiccl
