// Threads, the watchdog, and what reaches the launcher.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

#include "tests/job/stream.h"

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
