// Waiting is for the other ranks only, as for a GPU's queue: nothing here waits for a plugin.
#include "tests/job/stream.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <limits>
#include <thread>

using namespace dynamiccl;

namespace {

constexpr int kYields = 20;
constexpr auto kPause = std::chrono::microseconds(50);
constexpr std::uint64_t kHiccupNs = 5'000'000;

bool g_is_forked_child = false;

void sleep_s(double seconds) {
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

}  // namespace

/// Asked by the leak detector: a child has the memory of threads that are not there.
extern "C" __attribute__((visibility("default"))) int __lsan_is_turned_off();
int __lsan_is_turned_off() { return static_cast<int>(g_is_forked_child); }

Stream::Stream(RankContext& context, int slot)
    : context_(context),
      slot_(slot),
      members_(context.plan.members(slot, context.rank)),
      lane_(context.board.lane(slot, context.rank)),
      random_(context.options.seed * 1000003 +
              static_cast<std::uint64_t>(context.rank * 1009 + slot)),
      begin_ns_(now_ns()) {
  for (const Action& action : context.options.actions) {
    const bool is_ours = action.slot == slot;
    due_.push_back(is_ours ? action.call : std::numeric_limits<std::uint64_t>::max());
  }
}

Stream::~Stream() {
  for (std::thread& aborter : aborters_) aborter.join();
}

bool Stream::somebody_is_lost() const {
  for (const int rank : members_) {
    const Lane& lane = context_.board.lane(slot_, rank);
    const bool died = context_.board.ranks[rank].dead && !lane.gone;
    if (rank != context_.rank && (died || lane.lost)) return true;
  }
  return false;
}

/// Whether `condition` holds for every other rank that can still come to fulfil it.
bool Stream::all_others(const std::function<bool(const Lane&)>& condition) const {
  for (const int rank : members_) {
    if (rank == context_.rank) continue;
    const Lane& lane = context_.board.lane(slot_, rank);
    const bool is_lost = lane.lost || (context_.board.ranks[rank].dead && !lane.gone);
    const bool is_done = lane.gone && !lane.lost;
    const bool skipped = is_done || (is_lost && context_.options.survivors_go_on);
    if (!skipped && (is_lost || !condition(lane))) return false;
  }
  return true;
}

void Stream::wait(const std::function<bool()>& condition) {
  for (int i = 0; !condition(); ++i) {
    if (aborted_) throw Aborted();
    if (i < kYields) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(kPause);
    }
  }
}

void Stream::create() {
  try {
    const std::uint64_t stage = 2 * static_cast<std::uint64_t>(generation_) + 1;
    if (context_.options.shrinks && slot_ > 0 && generation_ == 0) {
      // A parent is ready before anything is made of it (2.30.7 `init.cc:3095`).
      const Lane& parent = context_.board.lane(slot_ > 1 ? 1 : 0, context_.rank);
      wait([&] { return parent.stage >= 2 || parent.gone; });
      if (parent.stage < 2) throw Aborted();
    }
    lane_.stage = stage;
    wait([&] { return all_others([&](const Lane& lane) { return lane.stage >= stage; }); });
    const auto position = std::find(members_.begin(), members_.end(), context_.rank);
    const CommunicatorOptions options = {context_.plan.comm_id(slot_, context_.rank, generation_),
                                         static_cast<int>(position - members_.begin()),
                                         static_cast<int>(members_.size()),
                                         context_.plan.num_nodes(members_)};
    const auto make = [&] {
      communicator_ = std::make_unique<Communicator>(context_.process, options);
    };
    if (context_.rank == context_.options.aborts_creation && slot_ == 0 && generation_ == 0) {
      std::thread creation([&] {
        adopt_thread();
        make();
      });
      creation.join();  // ncclCommAbort waits for it (2.30.7 `init.cc:3041`)
      communicator_->abort();
      throw Aborted();
    }
    make();
    first_call_ = calls_;
    exists_ = true;
    if (aborted_ && exists_.exchange(false)) communicator_->abort();  // it came meanwhile
    lane_.stage = stage + 1;
    wait([&] { return all_others([&](const Lane& lane) { return lane.stage > stage; }); });
  } catch (const Aborted&) {
    finish(true);
  } catch (const std::exception& error) {
    context_.report_error(slot_, calls_, error.what());
    finish(true);
  }
}

bool Stream::step() {
  if (over_) return false;
  const std::uint64_t lifetime = context_.options.calls_per_lifetime;
  try {
    if (calls_ >= context_.options.num_calls) {
      destroy();
      finish(false);
    } else if (lifetime > 0 && calls_ - first_call_ >= lifetime) {
      destroy();
      ++generation_;
      create();
    } else {
      act();
      run_group();
    }
  } catch (const Aborted&) {
    finish(true);
  } catch (const std::exception& error) {
    context_.report_error(slot_, calls_, error.what());
    start_abort(0);  // as a job does whose collective failed
    finish(true);
  }
  return !over_;
}

void Stream::run_group() {
  const auto run_ahead = static_cast<std::uint64_t>(context_.options.run_ahead);
  wait([&] {
    return all_others([&](const Lane& lane) { return calls_ < lane.issued + run_ahead; });
  });
  pace();
  if (group_ >= window_.end) window_ = {};
  std::uint64_t index = group_;
  if (window_.length > 0) index = window_.first + (group_ - window_.first) % window_.length;
  if (window_.is_mine) {
    const Graph& graph = window_.graphs[index - window_.first];
    communicator_->replay(graph);
    std::vector<Outcome> outcomes;
    for (const Aggregate& aggregate : graph.aggregates) outcomes.push_back(aggregate.outcome);
    push(outcomes, true);
  } else {
    push(communicator_->run(context_.plan.group(slot_, index)), false);
  }
  ++group_;
}

void Stream::push(const std::vector<Outcome>& outcomes, bool replayed) {
  for (const Outcome& outcome : outcomes) {
    wait([&] { return lane_.issued - lane_.checked < kRingRecords; });
    Record& record = lane_.ring[lane_.issued % kRingRecords];
    record = {calls_ - first_call_,
              outcome.size_bytes,
              generation_,
              outcome.question,
              outcome.num_channels,
              static_cast<std::uint8_t>(outcome.collective),
              static_cast<std::uint8_t>(outcome.algorithm),
              static_cast<std::uint8_t>(outcome.protocol),
              outcome.acted,
              replayed};
    ++calls_;
    lane_.issued += 1;
  }
}

void Stream::pace() {
  const Options& options = context_.options;
  if (options.calls_per_s > 0) {
    const double due_ns = 1e9 * static_cast<double>(calls_) / options.calls_per_s;
    const std::uint64_t due = begin_ns_ + static_cast<std::uint64_t>(due_ns);
    const std::uint64_t now = now_ns();
    if (due > now) {
      std::this_thread::sleep_for(std::chrono::nanoseconds(due - now));
    } else if (now - due > kHiccupNs) {
      begin_ns_ += now - due;  // no job makes good a pause of its machine by calling faster
    }
  }
  if (options.jitter_us > 0 && random_() % 8 == 0) {
    const auto most_us = static_cast<std::uint64_t>(8 * options.jitter_us);
    std::this_thread::sleep_for(std::chrono::microseconds(random_() % most_us));
  }
}

void Stream::act() {
  const std::vector<Action>& actions = context_.options.actions;
  for (std::size_t i = 0; i < actions.size(); ++i) {
    if (calls_ < due_[i]) continue;
    const Action& action = actions[i];
    due_[i] = action.repeats ? (calls_ / action.call + 1) * action.call
                             : std::numeric_limits<std::uint64_t>::max();
    perform(action, i);
  }
}

void Stream::perform(const Action& action, std::size_t index) {
  const bool is_mine = action.rank < 0 || action.rank == context_.rank;
  const auto number = [&](std::size_t i) { return std::atof(action.arguments[i].c_str()); };
  if (action.kind == Action::Kind::capture) {  // the others repeat the groups as well
    window_ = {};
    window_.first = group_;
    window_.length = static_cast<std::uint64_t>(number(0));
    window_.end = group_ + window_.length * static_cast<std::uint64_t>(number(1));
    window_.is_mine = is_mine;
    for (std::uint64_t i = 0; is_mine && i < window_.length; ++i) {
      window_.graphs.push_back(communicator_->capture(context_.plan.group(slot_, group_ + i)));
    }
    return;
  }
  if (!is_mine) return;
  switch (action.kind) {
    case Action::Kind::simulate:
    case Action::Kind::symmetric: {
      std::vector<Task> tasks;
      while (tasks.size() < static_cast<std::size_t>(number(0))) {
        tasks.push_back(context_.plan.group(slot_, group_ + 3 * tasks.size()).front());
      }
      return action.kind == Action::Kind::simulate ? communicator_->simulate(tasks)
                                                   : communicator_->ask_about_symmetric(tasks);
    }
    case Action::Kind::p2p:
      return communicator_->send_receive();
    case Action::Kind::bcasts: {
      std::vector<Task> tasks;
      while (tasks.size() < static_cast<std::size_t>(number(0))) {
        tasks.push_back({kBroadcast, std::size_t{4096} << tasks.size(), Datatype::f32});
      }
      return push(communicator_->broadcast_many(tasks), false);
    }
    case Action::Kind::sleep:
      return sleep_s(number(0));
    case Action::Kind::kill:
      kill(getpid(), SIGKILL);
      return;
    case Action::Kind::fork: {
      const pid_t child = fork();
      if (child == 0) {
        g_is_forked_child = true;
        sleep_s(0.02);
        std::exit(0);
      }
      return;
    }
    case Action::Kind::abort:
      return start_abort(number(0));
    default:
      return ask_launcher(index);
  }
}

/// One request at a time; what follows the launcher's answer happens after it.
void Stream::ask_launcher(std::size_t index) {
  std::atomic<std::uint32_t>& request = context_.board.ranks[context_.rank].request;
  const auto number = static_cast<std::uint32_t>(index) + 1;
  wait([&] {
    std::uint32_t none = 0;
    return request.compare_exchange_strong(none, number);
  });
  wait([&] { return request != number; });
}

void Stream::destroy() {
  if (!context_.options.destroys && calls_ >= context_.options.num_calls) {
    static std::mutex mutex;
    static auto* forgotten = new std::vector<std::unique_ptr<Communicator>>;
    const std::lock_guard<std::mutex> lock(mutex);
    forgotten->push_back(std::move(communicator_));
    return;
  }
  wait([&] { return all_others([&](const Lane& lane) { return lane.issued >= calls_; }); });
  {
    const std::lock_guard<std::mutex> lock(abort_mutex_);
    if (aborted_) throw Aborted();
    exists_ = false;  // from here on nobody may abort it
  }
  communicator_->destroy();
}

void Stream::finish(bool lost) {
  over_ = true;
  lane_.lost = lost;
  lane_.gone = true;
}

void Stream::start_abort(double delay_s) {
  const std::lock_guard<std::mutex> lock(abort_mutex_);
  aborters_.emplace_back([this, delay_s] {
    adopt_thread();
    sleep_s(delay_s);
    {
      const std::lock_guard<std::mutex> own(abort_mutex_);
      if (aborted_.exchange(true) || !exists_.exchange(false)) return;
    }
    communicator_->abort();
  });
}

void Stream::watch() {
  if (over_ || aborted_ || context_.options.survivors_go_on || !somebody_is_lost()) return;
  if (lost_since_ns_ == 0) lost_since_ns_ = now_ns();
  const double lost_s = 1e-9 * static_cast<double>(now_ns() - lost_since_ns_);
  if (lost_s < context_.options.watchdog_s) return;
  lost_since_ns_ = now_ns();
  start_abort(0);
}

// The rank's threads and watchdog, and what reaches the launcher.

namespace {

void raise_to(std::atomic<std::uint64_t>* most, std::uint64_t value) {
  std::uint64_t seen = *most;
  while (value > seen && !most->compare_exchange_weak(seen, value)) {
  }
}

class BoardWitness : public Witness {
 public:
  BoardWitness(RankState& state, int descriptor) : state_(state), descriptor_(descriptor) {}

  void log(int level, const std::string& line) override {
    write_line('L', (level <= NCCL_LOG_WARN ? "WARN " : "INFO ") + line);
  }
  void violation(const std::string& what) override {
    if (state_.violations++ < kMostLines) write_line('V', what);
  }
  void asked(std::uint64_t took_ns) override {
    state_.calls_asked.fetch_add(1, std::memory_order_relaxed);
    raise_to(&state_.asked_longest_ns, took_ns);
  }
  void created(std::uint64_t took_ns) override { raise_to(&state_.created_longest_ns, took_ns); }
  void error(const std::string& what) {
    if (state_.errors++ < kMostLines) write_line('E', what);
  }

 private:
  static constexpr std::uint64_t kMostLines = 100;

  void write_line(char kind, std::string text) {
    for (char& letter : text) {
      if (letter == '\n') letter = ' ';
    }
    const std::string line = std::string(1, kind) + "\t" + text + "\n";
    // Appended whole, so that lines of several threads do not mix.
    if (write(descriptor_, line.data(), line.size()) < 0) std::abort();
  }

  RankState& state_;
  const int descriptor_;
};

ProcessOptions process_options(const Options& options, int rank) {
  ProcessOptions chosen;
  const auto named = [](const char* name) {
    const char* path = std::getenv(name);
    return std::string(path != nullptr ? path : "");
  };
  chosen.tuner_path = named("NCCL_TUNER_PLUGIN");
  chosen.profiler_path = named("NCCL_PROFILER_PLUGIN");
  chosen.proxy = {options.kernel_delay_us, options.kernel_drop_percent,
                  options.kernel_duplicate_percent};
  chosen.seed = options.seed * 31 + static_cast<std::uint64_t>(rank);
  chosen.slow_cell = options.slow_cell;
  chosen.slow_factor = options.slow_factor;
  chosen.scatter_percent = options.scatter_percent;
  return chosen;
}

/// One after the other, or all of them at once, as ncclGroupEnd creates those of a group.
void create_all(bool at_once, const std::vector<std::unique_ptr<Stream>>& streams) {
  std::vector<std::thread> threads;
  for (const auto& stream : streams) {
    if (at_once) {
      threads.emplace_back([&stream] {
        adopt_thread();
        stream->create();
      });
    } else {
      stream->create();
    }
  }
  for (std::thread& thread : threads) thread.join();
}

void play(const Options& options, int rank, std::vector<std::unique_ptr<Stream>>* streams) {
  std::atomic<bool> finished{false};
  std::thread watchdog([&] {
    while (!finished) {
      for (const auto& stream : *streams) stream->watch();
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  });
  create_all(options.creates_at_once, *streams);
  std::vector<std::thread> threads;
  const auto num_threads = static_cast<std::size_t>(options.num_threads);
  const auto call = [&](std::size_t thread) {
    std::vector<Stream*> own;  // in one order on all ranks
    for (std::size_t i = thread; i < streams->size(); i += num_threads) {
      own.push_back((*streams)[i].get());
    }
    if (options.is_opposite && rank % 2 == 1) std::reverse(own.begin(), own.end());
    for (bool alive = true; alive;) {  // one group on each
      alive = false;
      for (Stream* stream : own) alive = stream->step() || alive;
    }
  };
  for (std::size_t thread = 0; thread + 1 < num_threads; ++thread) {
    threads.emplace_back([&call, thread] {
      adopt_thread();
      call(thread);
    });
  }
  call(num_threads - 1);
  for (std::thread& thread : threads) thread.join();
  finished = true;
  watchdog.join();
}

}  // namespace

int run_rank(const Options& options, const RankStart& start) {
  adopt_thread();
  RankState& state = start.board->ranks[start.rank];
  static BoardWitness* witness = new BoardWitness(state, start.log_descriptor);
  set_witness(witness);
  while (!start.board->go) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  // Kept for good: threads of a plugin that was not told of the end may still use it.
  static Process* process =
      new Process(release_named(options.release), process_options(options, start.rank), *witness);
  const Plan plan(options, start.job_id);
  RankContext context = {options,
                         plan,
                         *start.board,
                         *process,
                         start.rank,
                         [](int slot, std::uint64_t call, const std::string& what) {
                           witness->error("comm " + std::to_string(slot) + " call " +
                                          std::to_string(call) + ": " + what);
                         }};
  std::vector<std::unique_ptr<Stream>> streams;
  for (int slot = 0; slot < options.num_slots; ++slot) {
    streams.push_back(std::make_unique<Stream>(context, slot));
  }
  play(options, start.rank, &streams);
  return 0;
}
