// Plays a rank of a job against a tuner and profiler plugin, as NCCL would, without NCCL and GPUs.
//
//   play_rank [--NAME VALUE]...      as play.py starts it; options.h has the names
#include <sys/prctl.h>

#include "tests/job/stream.h"

namespace {

int g_release = 0;

/// One after the other, or all of them at once, as ncclGroupEnd creates those of a group.
void create(const std::vector<std::unique_ptr<Stream>>& streams, bool at_once) {
  std::vector<std::thread> threads;
  for (const auto& stream : streams) {
    threads.push_back(start_thread([&stream] { stream->create(); }));
    if (!at_once) threads.back().join();
  }
  for (std::thread& thread : threads) {
    if (thread.joinable()) thread.join();
  }
}

void call_in_turn(const std::vector<Stream*>& streams) {
  for (bool is_alive = true; is_alive;) {  // one group on each
    is_alive = false;
    for (Stream* stream : streams) is_alive = stream->step() || is_alive;
  }
}

/// Plays a rank's part to its end; with `one-thread` those of all ranks, which are called in turn,
/// so that a call that waited for another rank's would wait in vain.
void play(const Options& options) {
  const Board board(options);
  const int rank = options["rank"], num_threads = options["threads"];
  const bool on_one_thread = options["one-thread"] != 0;
  t_is_ours = true;
  g_state = &board.rank(rank);
  // Kept for good: threads of a plugin that was not told of the end may still use them.
  static auto* process = new Process{options};
  static auto* streams = new std::vector<std::unique_ptr<Stream>>;
  for (int slot = 0; slot < options["comms"]; ++slot) {
    for (int each = rank; each <= (on_one_thread ? options["ranks"] - 1 : rank); ++each) {
      streams->push_back(std::make_unique<Stream>(*process, board, each, slot));
    }
  }
  std::atomic<bool> is_finished{false};
  std::thread watchdog = start_thread([&] {
    for (; !is_finished; sleep_s(0.02)) {
      for (const auto& stream : *streams) stream->watch();
    }
  });
  create(*streams, on_one_thread || options["create-at-once"] != 0);
  std::vector<std::thread> threads;
  for (int thread = 0; thread < num_threads; ++thread) {
    std::vector<Stream*> own;  // in one order on all ranks
    for (int i = thread; i < static_cast<int>(streams->size()); i += num_threads) {
      own.push_back((*streams)[static_cast<std::size_t>(i)].get());
    }
    if (options["opposite"] != 0 && rank % 2 == 1) std::reverse(own.begin(), own.end());
    threads.push_back(start_thread([own] { call_in_turn(own); }));
  }
  for (std::thread& thread : threads) thread.join();
  is_finished = true;
  watchdog.join();
  for (const auto& stream : *streams) stream->join();
}

}  // namespace

/// A program that uses NCCL has this, and a plugin may ask it.
extern "C" __attribute__((visibility("default"))) ncclResult_t ncclGetVersion(int* version) {
  *version = g_release;
  return ncclSuccess;
}

int main(int count, char** arguments) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  static Options options;
  try {
    options = parse({arguments + 1, arguments + count});
    g_release = options.release;
    play(options);
  } catch (const std::invalid_argument& error) {
    std::fprintf(stderr, "play_job: %s\n", error.what());
    return 2;
  }
  return 0;
}
