// Mode adaptive, as NCCL sees it: a communicator agrees in `init` as in mode table, then looks up
// in the table in force, and votes on the next one from inside those of its calls that are stops
// (agree/stops.h). No thread, no file, and no connection but during a stop. What is no success:
// tuner/init.h.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

#include "agree/stops.h"
#include "identity/environment.h"
#include "platform/system.h"
#include "profiler/profiler.h"
#include "tuner/init.h"

namespace {

using namespace dynamiccl;

class Switching;
Mutex g_mutex;  // of these, of the times that they hold, and of which table describes a record
Switching* g_all = nullptr;
// Of the process, since one thread may call many communicators.
std::atomic<std::uint64_t> g_since_ns{0}, g_waited_ns{0};

/// One communicator that has a table.
class Switching {
 public:
  /// A second one of one id ends voting for both.
  Switching(const Joining& joined, Profiler* profiler) noexcept
      : communicator_(joined.communicator),
        profiler_(profiler),
        arbiter_(joined.arbiter),
        vote_(joined.vote),
        stops_(communicator_.comm_id, joined.table, joined.exchange.proposal) {
    const int ppm = sample_ppm_of(value_of("DYNAMICCL_STOP_PERCENT", "0.1"));
    if (ppm >= 0) stop_ppm_ = static_cast<std::uint64_t>(ppm);
    static constexpr Hooks kHooks = {describe, take_time};
    std::uint64_t never = 0;
    g_since_ns.compare_exchange_strong(never, monotonic_ns());
    g_hooks.store(&kHooks);
    const Lock lock(&g_mutex);
    profiler_->tuner = this;
    for (Switching* each = g_all; each != nullptr; each = each->next_) {
      if (each->communicator_.comm_id != communicator_.comm_id) continue;
      for (Switching* one : {each, this}) one->end_voting("another communicator here has its id");
    }
    next_ = g_all;
    g_all = this;
  }

  /// Ids may repeat from now on: no communicator of this process votes any more.
  static void end_voting_of_all() noexcept {
    const Lock lock(&g_mutex);
    for (Switching* each = g_all; each != nullptr; each = each->next_)
      each->end_voting("a communicator was shrunk: ids may repeat");
  }

  /// Give it back. ncclCommAbort calls this from another thread while a call may be inside `answer`
  /// (`src/init.cc`): the call is woken within 10 ms, and this returns after it has left.
  void retire() noexcept {
    leaves_.store(true);
    {
      const Lock lock(&g_mutex);
      Switching** link = &g_all;
      while (*link != this) link = &(*link)->next_;
      *link = next_;
      if (profiler_->tuner == this) profiler_->tuner = nullptr;
    }
    // Rather a leak than a call in freed memory.
    if (wait_until([this] { return inside_.load() == 0; })) deallocate(this);
  }

  /// Set the chosen cell to 0.0 and, with it, the channels; or touch nothing.
  ncclResult_t answer(const Question& question) noexcept {
    CallMarks* marks = &profiler_->call_marks;
    const bool overlaps = inside_.fetch_add(1) != 0;
    // NCCL forbids calls of one communicator at the same time; they cannot be counted.
    if (overlaps) end_voting("calls of it overlap");
    if (!overlaps && stops_.is_due(marks->begins_group())) stop();
    const bool has_failed = has_failed_.load();
    const DecisionTable* table = has_failed ? nullptr : stops_.table();
    if (table != nullptr) {
      dynamiccl::answer(*table, question);
    }
    const std::uint64_t told = marks->pass();
    if (!overlaps) stops_.answered(question.collective, question.size_bytes, told);
    inside_.fetch_sub(1);
    return has_failed ? ncclRemoteError : ncclSuccess;
  }

 private:
  /// Of the latest calls since the last stop, as many as the body of a vote holds.
  static constexpr std::size_t kMostTimes = (kMostBodyBytes - sizeof(Told)) / sizeof(CallTime);

  /// The call is a stop: it goes on with a new table, or with the one in force.
  void stop() noexcept {
    const std::uint64_t from_ns = monotonic_ns();
    const std::uint64_t lived_ns = from_ns - g_since_ns.load(), waited_ns = g_waited_ns.load();
    const bool has_time = waited_ns <= lived_ns / 1'000'000 * stop_ppm_;
    if (!has_time || leaves_.load() || in_forked_child()) return stop_failed();
    Vote vote = vote_;
    vote.nonce = draw();
    stops_.write_vote(&vote);
    std::uint8_t body[kMostBodyBytes];  // first what is told, then what comes
    vote.body_bytes = write_told(lived_ns, waited_ns, body);
    Exchange exchange;
    exchange.told = exchange.body = body;
    exchange.accepts = accept;
    exchange.user = this;
    exchange.leaves = &leaves_;
    const Limits limits = limits_of_job();
    const Verdict verdict =
        agree_by_arbiter(arbiter_, vote, limits, stops_.patience_ms(limits), &exchange);
    g_waited_ns.fetch_add(monotonic_ns() - from_ns);
    if (verdict == Verdict::kTable) return agreed(exchange.proposal);
    if (verdict == Verdict::kAbstain) return stop_failed();
    has_failed_.store(true);
    stops_.end_voting();
    if (leaves_.load()) return;  // who aborts it knows
    say(NCCL_LOG_WARN, "this communicator must not be used: other ranks may have another table");
  }

  /// What the leader is told, and of how many bytes it is.
  std::uint32_t write_told(std::uint64_t lived_ns, std::uint64_t waited_ns,
                           std::uint8_t* body) noexcept {
    Told told;
    told.lived_ns = lived_ns;
    told.waited_ns = waited_ns;
    told.num_nodes = static_cast<std::uint32_t>(communicator_.num_nodes);
    told.nccl_version = static_cast<std::uint32_t>(communicator_.nccl_version);
    told.has_table = stops_.table() != nullptr ? 1 : 0;
    told.last_table = stops_.last_table()->checksum;
    std::memcpy(body, &told, sizeof told);
    const Lock lock(&g_mutex);
    const std::size_t size = std::min(num_times_, kMostTimes) * sizeof *times_;
    std::memcpy(body + sizeof told, times_, size);
    num_times_ = 0;
    return static_cast<std::uint32_t>(sizeof told + size);
  }

  /// All that may fail of a proposal, before it is confirmed.
  static bool accept(void* user, const Exchange& exchange) noexcept {
    auto* own = static_cast<Switching*>(user);
    const Reply& proposal = exchange.proposal;
    if (proposal.change != Change::kNewTable) return proposal.body_bytes == 0;
    DecisionTable* table = &own->received_[own->latest_ ^ 1];  // will not be in force again
    if (decode_table(exchange.body, proposal.body_bytes, table) != nullptr) return false;
    leave_out_what_no_job_may_ask(own->communicator_.nccl_version, table);
    const Communicator& communicator = own->communicator_;
    return is_for(*table, communicator.num_nodes, communicator.num_ranks);
  }

  /// `proposal` is the one that was confirmed.
  void agreed(const Reply& proposal) noexcept {
    const bool is_change = proposal.change != Change::kNothing;
    {
      const Lock lock(&g_mutex);
      if (proposal.change == Change::kNewTable) latest_ ^= 1;
      stops_.agreed(proposal, &received_[latest_]);
      if (is_change) table_number_ = static_cast<std::uint32_t>(stops_.number());
    }
    if (is_change) profiler_->take_times(stops_.table() == nullptr);  // of probes
    if (proposal.reason[0] == '\0' || std::strcmp(said_, proposal.reason) == 0) return;
    std::memcpy(said_, proposal.reason, sizeof said_);
    say(NCCL_LOG_INFO, said_);
  }

  void stop_failed() noexcept {
    stops_.failed();
    if (stops_.index() == Stops::kNever) end_voting("too many stops in a row came to nothing");
  }

  void end_voting(const char* why) noexcept {
    if (stops_.end_voting()) say(NCCL_LOG_INFO, "what is in force stays: ", why);
  }

  void say(ncclDebugLogLevel level, const char* what, const char* why = "") const noexcept {
    dynamiccl::say(communicator_, level, "from call %llu: %s%s",
                   static_cast<unsigned long long>(stops_.calls() + 1), what, why);
  }

  /// On the thread of an event: of a graph's launches it is one of CUDA's.
  static void describe(const Profiler& of, CallRecord* record) noexcept {
    const Lock lock(&g_mutex);
    const Switching* own = switching_of(of, *record);
    if (own == nullptr) return;
    const DecisionTable* table = own->stops_.table();
    if (table == nullptr) record->flags |= kFlagProbe;
    if (table == nullptr) return;
    record->table = own->table_number_;
    const Entry* entry = lookup(*table, record->collective, record->size_bytes);
    record->decided = entry != nullptr &&
                      (entry->algorithm == kAuto || entry->algorithm == record->algorithm) &&
                      (entry->protocol == kAuto || entry->protocol == record->protocol);
  }

  static void take_time(const Profiler& of, const CallRecord& record) noexcept {
    if (record.start_ns == 0 || record.stop_ns <= record.start_ns) return;
    // Launches of a graph share a number, and run what was chosen at their capture.
    if ((record.flags & kFlagCaptured) != 0) return;
    const Lock lock(&g_mutex);
    Switching* own = switching_of(of, record);
    if (own == nullptr) return;
    own->times_[own->num_times_++ % kMostTimes] = {
        record.sequence,     record.size_bytes, record.stop_ns - record.start_ns,
        record.collective,   record.algorithm,  record.protocol,
        record.num_channels, record.decided,    record.flags};
  }

  /// Null: none, or the profiler is another communicator's since. Under the mutex.
  static Switching* switching_of(const Profiler& profiler, const CallRecord& record) noexcept {
    auto* own = static_cast<Switching*>(profiler.tuner);
    return own != nullptr && own->communicator_.comm_id == record.comm_id ? own : nullptr;
  }

  const Communicator communicator_;
  Profiler* const profiler_;
  const Arbiter arbiter_;
  const Vote vote_;
  Stops stops_;
  std::uint64_t stop_ppm_ = 1'000;
  std::atomic<int> inside_{0};
  std::atomic<bool> leaves_{false};
  std::atomic<bool> has_failed_{false};
  DecisionTable received_[2];  // at stops, of which one may be in force
  int latest_ = 0;
  std::uint32_t table_number_ = 1;
  char said_[sizeof Reply::reason] = "";  // the leader's latest words
  Switching* next_ = nullptr;
  CallTime times_[kMostTimes];
  std::size_t num_times_ = 0;  // since the last stop
};

struct AdaptiveTuner {
  static ncclResult_t create(Communicator communicator, void** context) noexcept {
    // It is taken, and the id remembered, whatever follows.
    Profiler* const profiler = take_created(communicator.comm_id);
    communicator = check_communicator(communicator);
    if (communicator.ids_repeat) Switching::end_voting_of_all();
    // Before, the profiler does not tell which questions were launched as calls, and calls that a
    // rank only simulates would make the ranks differ at a stop.
    if (communicator.abi_version < 5) {
      communicator.reason_to_abstain =
          "mode adaptive needs NCCL 2.28 or later; mode table does not";
    }
    Joining joining = {communicator, "none", true};
    void* room = std::malloc(sizeof(Switching));  // nothing that can fail may come after the vote
    const char* problem = room == nullptr ? "memory is short" : "";
    if (profiler == nullptr) {
      problem =
          "NCCL_PROFILER_PLUGIN does not name this library too: mode adaptive needs what NCCL "
          "tells a profiler alone";
    }
    std::snprintf(joining.problem, sizeof joining.problem, "%s", problem);
    const ncclResult_t result = agree_in_init(&joining);
    if (joining.verdict == Verdict::kTable) {
      *context = new (room) Switching(joining, profiler);
    } else {
      std::free(room);
    }
    return result;
  }

  static ncclResult_t answer(void* context, const Question& question) noexcept {
    if (!question.is_about_a_cell()) return ncclSuccess;
    return static_cast<Switching*>(context)->answer(question);
  }

  static ncclResult_t finalize(void* context) noexcept {
    static_cast<Switching*>(context)->retire();
    return ncclSuccess;
  }
};

}  // namespace

DYNAMICCL_EXPORT_TUNER(AdaptiveTuner)
