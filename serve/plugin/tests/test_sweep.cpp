// A benchmark's calls in its own order: every call of a block gets the block's config, and nothing
// else does.
#include <chrono>
#include <optional>
#include <thread>

#include "sweep/playing.h"
#include "tests/check.h"
#include "tests/library.h"
#include "tests/schedule_file.h"

using namespace dynamiccl;

namespace {

const int kWithCosts[] = {3, 4, 5, 6};

Call call_of(std::uint64_t size_bytes, int collective = kAllReduce) {
  Call call;
  call.collective = collective;
  call.size_bytes = size_bytes;
  return call;
}

/// Whether NCCL was left its own choice.
bool abstained(const Call& after) {
  return after.result == ncclSuccess && after.num_channels == 0 &&
         after.costs == std::vector<float>(after.costs.size(), 10.0F);
}

/// Whether `config`'s own cell was set to 0.0 with its channels, and nothing else.
bool got(const Call& after, const Entry& config) {
  if (config.act == 0) return abstained(after);
  std::vector<float> costs(after.costs.size(), 10.0F);
  costs[static_cast<std::size_t>(config.algorithm * 3 + config.protocol)] = 0.0F;
  return after.result == ncclSuccess && after.num_channels == config.num_channels &&
         after.costs == costs;
}

bool warm_up(const Library& library, int version, void* context, const Plan& plan) {
  bool all = true;
  for (const WarmupRun& run : plan.warmup) {
    for (std::uint64_t i = 0; i < run.num_calls; ++i) {
      all &= abstained(library.ask(version, context, call_of(run.size_bytes, plan.collective)));
    }
  }
  return all;
}

/// All calls of a benchmark that follows the plan; whether each got what it should.
bool follow(const Library& library, int version, void* context, const Plan& plan) {
  bool all = warm_up(library, version, context, plan);
  for (std::size_t block = 0; block < plan.blocks.size(); ++block) {
    const std::uint64_t size_bytes = plan.sizes[block % plan.sizes.size()];
    for (int i = 0; i < plan.calls_per_block(); ++i) {
      const Call after = library.ask(version, context, call_of(size_bytes, plan.collective));
      all &= got(after, plan.configs[plan.blocks[block]]);
    }
  }
  return all;
}

void whole_order(const Library& library, const SweepDirectory& sweep) {
  Plan plain;
  Plan one_half;
  one_half.halves = 1;
  Plan no_warmup;
  no_warmup.warmup.clear();
  Plan one_call = one_half;
  one_call.calls_per_half = 1;
  Plan gather;
  gather.collective = kAllGather;
  gather.configs = {{kPAT, kSimple, 8, 1, 0}, {-1, -1, 0, 0, 0}, {kRing, kLL, 2, 1, 0}};
  for (const Plan& plan : {plain, one_half, no_warmup, one_call, gather}) {
    sweep.write(schedule_of(plan));
    for (const int version : kWithCosts) {
      sweep.ask_for_report();
      void* context = library.init(version, 8, 1);
      CHECK(context != nullptr && t_init_result == ncclSuccess);
      CHECK(follow(library, version, context, plan));
      for (const std::uint64_t size : plan.sizes) {  // after the last block: NCCL's own
        CHECK(abstained(library.ask(version, context, call_of(size, plan.collective))));
      }
      library.finalize(version, context);
      const Bytes report = sweep.read_report();
      const int states[] = {kPlayed, kAbstained, kPlayed, kPlayed};
      for (std::size_t i = 0; i < 4; ++i) CHECK(report_state(report, 4, i) == states[i]);
      const std::size_t warmup = plan.warmup.empty() ? 0 : 6;
      const auto blocks = 4 * static_cast<std::size_t>(plan.calls_per_block());
      CHECK(report_calls(report) == warmup + blocks + plan.sizes.size());
      CHECK(report_stop(report) == 0);
    }
  }
}

/// NCCL 2.31 asks about symmetric kernels too, three times before each call: none of these is one.
void symmetric_kernels_are_no_calls(const Library& library, const SweepDirectory& sweep) {
  const Plan plan;
  sweep.write(schedule_of(plan));
  for (const int version : kWithCosts) {
    sweep.ask_for_report();
    void* context = library.init(version, 8, 1);
    CHECK(warm_up(library, version, context, plan));
    for (std::size_t block = 0; block < plan.blocks.size(); ++block) {
      for (int i = 0; i < plan.calls_per_block(); ++i) {
        Call call = call_of(plan.sizes[block % plan.sizes.size()]);
        call.num_pipe_ops = 0;
        for (int j = 0; j < 3; ++j) CHECK(abstained(library.ask(version, context, call)));
        call.num_pipe_ops = 1;
        const Entry& config = plan.configs[plan.blocks[block]];
        CHECK(got(library.ask(version, context, call), config));
      }
    }
    library.finalize(version, context);
    const Bytes report = sweep.read_report();
    CHECK(report_calls(report) == 38 && report_stop(report) == 0);
  }
}

void says_once_what_it_plays(const Library& library, const SweepDirectory& sweep) {
  const Plan plan;
  const Bytes bytes = schedule_of(plan);
  sweep.write(bytes);
  sweep.ask_for_report();
  t_lines.clear();
  void* context = library.init(5, 8, 1);
  CHECK(follow(library, 5, context, plan));
  library.finalize(5, context);
  CHECK(t_lines.size() == 1);
  CHECK(t_lines[0] == "DYNAMICCL: 8 ranks on 1 nodes: plays 4 blocks from " + sweep.schedule() +
                          " (hash " + hash_of(bytes) + ", tuner v5), reports to " + sweep.report());
}

void unavailable_cells(const Library& library, const SweepDirectory& sweep) {
  const Plan plan;
  sweep.write(schedule_of(plan));
  for (const int version : kWithCosts) {
    sweep.ask_for_report();
    void* context = library.init(version, 8, 1);
    CHECK(warm_up(library, version, context, plan));
    for (int i = 0; i < 32; ++i) {
      Call call = call_of(i / 8 % 2 == 0 ? 1024 : 4096);
      if (i < 8) call.costs[4] = -1.0F;     // block 0 wants Ring/LL128
      if (i >= 20) call.num_protocols = 2;  // from the middle of block 2 on: not a cost table
      const Call after = library.ask(version, context, call);
      const bool plays = i >= 16 && i < 20;
      CHECK(plays ? got(after, plan.configs[2])
                  : after.costs == call.costs && after.num_channels == 0);
    }
    library.finalize(version, context);
    const Bytes report = sweep.read_report();
    const int states[] = {kUnavailable, kAbstained, kMixed, kUnavailable};
    for (std::size_t i = 0; i < 4; ++i) CHECK(report_state(report, 4, i) == states[i]);
    CHECK(report_stop(report) == 0);
  }
}

/// One wrong call, the n-th; whether nothing is played from there on, and the report says so.
bool stops_at(const Library& library, const SweepDirectory& sweep, std::uint64_t nth, Call wrong,
              const std::vector<int>& states) {
  const Plan plan;
  sweep.ask_for_report();
  void* context = library.init(6, 8, 1);
  std::uint64_t number = 0;
  std::uint64_t expected = 0;
  bool all = true;
  for (const WarmupRun& run : plan.warmup) {
    for (std::uint64_t i = 0; i < run.num_calls; ++i) {
      if (++number == nth) expected = run.size_bytes;
      all &= abstained(library.ask(6, context, number == nth ? wrong : call_of(run.size_bytes)));
    }
  }
  for (std::size_t i = 0; i < 32; ++i) {
    const std::uint64_t size_bytes = plan.sizes[i / 8 % 2];
    if (++number == nth) expected = size_bytes;
    const Call after = library.ask(6, context, number == nth ? wrong : call_of(size_bytes));
    all &= number < nth ? got(after, plan.configs[plan.blocks[i / 8]]) : abstained(after);
  }
  library.finalize(6, context);
  const Bytes report = sweep.read_report();
  for (std::size_t i = 0; i < 4; ++i) all &= report_state(report, 4, i) == states[i];
  return all && report_stop(report) == nth && report_calls(report) == number &&
         report_number(report, 40, 8) == expected &&
         report_number(report, 48, 8) == wrong.size_bytes &&
         report_number(report, 56, 4) == static_cast<std::uint64_t>(wrong.collective);
}

void mismatch_stops_for_good(const Library& library, const SweepDirectory& sweep) {
  sweep.write(schedule_of(Plan()));
  const std::vector<int> none = {kNotReached, kNotReached, kNotReached, kNotReached};
  CHECK(stops_at(library, sweep, 1, call_of(1025), none));
  CHECK(stops_at(library, sweep, 4, call_of(1024), none));  // one warm-up call too many
  CHECK(stops_at(library, sweep, 7, call_of(2048), none));
  const std::vector<int> first = {kMixed, kNotReached, kNotReached, kNotReached};
  CHECK(stops_at(library, sweep, 8, call_of(4096), first));
  CHECK(stops_at(library, sweep, 14, call_of(1024, kReduce), first));
  // The first block has more calls than the schedule gives it: its last ones were not played.
  CHECK(stops_at(library, sweep, 15, call_of(1024), first));
  const std::vector<int> one = {kPlayed, kNotReached, kNotReached, kNotReached};
  CHECK(stops_at(library, sweep, 15, call_of(2048), one));
  const std::vector<int> two = {kPlayed, kAbstained, kNotReached, kNotReached};
  CHECK(stops_at(library, sweep, 17, call_of(2048), two));
  CHECK(stops_at(library, sweep, 23, call_of(4096), two));
  const std::vector<int> three = {kPlayed, kAbstained, kPlayed, kMixed};
  CHECK(stops_at(library, sweep, 38, call_of(1), three));
}

void channels_left_to_nccl(const Library& library, const SweepDirectory& sweep) {
  Plan plan;
  plan.warmup.clear();
  plan.sizes = {1024};
  plan.calls_per_half = 1;
  plan.configs = {{kCollNetDirect, kSimple, 8, 1, 0},
                  {kNVLS, kSimple, 8, 1, 0},
                  {kAuto, kAuto, 6, 1, 0},
                  {kAuto, kLL, 6, 1, 0}};
  plan.blocks = {0, 1, 2, 3};
  for (const int num_nodes : {1, 2}) {
    plan.num_nodes = num_nodes;
    sweep.write(schedule_of(plan));
    for (const int version : kWithCosts) {
      void* context = library.init(version, 8, static_cast<std::size_t>(num_nodes));
      const int cells[] = {8, 14, 4, 0};  // of two that cost the same, the first
      const int channels[] = {0, num_nodes == 1 ? 8 : 0, 6, 6};
      for (std::size_t i = 0; i < 8; ++i) {
        Call call = call_of(1024);
        call.costs[4] = 5.0F;
        const Call after = library.ask(version, context, call);
        CHECK(after.costs[static_cast<std::size_t>(cells[i / 2])] == 0.0F);
        CHECK(after.num_channels == channels[i / 2]);
      }
      library.finalize(version, context);
    }
  }
}

void ranks_play_alike(const Library& library, const SweepDirectory& sweep) {
  Plan plan;
  plan.blocks.clear();
  for (int i = 0; i < 400; ++i) plan.blocks.push_back(static_cast<std::uint16_t>(i * i % 3));
  sweep.write(schedule_of(plan));
  sweep.ask_for_report();
  std::vector<std::thread> ranks;
  std::atomic<int> right{0};
  for (int rank = 0; rank < 8; ++rank) {
    ranks.emplace_back([&, rank] {
      const int version = 3 + rank % 4;
      void* context = library.init(version, 8, 1);
      if (follow(library, version, context, plan)) ++right;
      library.finalize(version, context);
    });
  }
  for (std::thread& rank : ranks) rank.join();
  CHECK(right == 8);
  const Bytes report = sweep.read_report();
  CHECK(report_calls(report) == 6 + 400 * 8);
  for (std::size_t i = 0; i < 400; ++i) {
    CHECK(report_state(report, 400, i) == (plan.blocks[i] == 1 ? kAbstained : kPlayed));
  }
}

/// Not something that NCCL does: nobody crashes, and who cannot count does not play.
void overlapping_calls_stop(const Library& library, const SweepDirectory& sweep) {
  Plan plan;
  plan.warmup.clear();
  plan.sizes = {1024};
  plan.calls_per_half = 1 << 20;
  plan.blocks = {0};
  sweep.write(schedule_of(plan));
  void* context = library.init(6, 8, 1);
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&] {
      for (int call = 0; call < 5000; ++call) {
        const Call after = library.ask(6, context, call_of(1024));
        if (!got(after, plan.configs[0]) && !abstained(after)) ++wrong;
        library.chunk(context, kAllReduce, kRing, kLL128, 1 << 19);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0);
  library.finalize(6, context);
}

/// ncclCommAbort finalizes while a call may be inside: neither it nor its report goes meanwhile.
void finalize_waits_for_the_call(const Library& library, const SweepDirectory& sweep) {
  sweep.write(schedule_of(Plan()));
  sweep.ask_for_report();
  void* context = library.init(6, 8, 1);
  std::atomic<bool> freed{false};
  std::optional<Visit> call(std::in_place, static_cast<Playing*>(context));
  std::thread aborter([&] {
    library.finalize(6, context);
    freed = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  CHECK(!freed);
  CHECK(abstained(library.ask(6, context, call_of(1024))));
  call.reset();
  aborter.join();
  CHECK(freed);
}

}  // namespace

int main(int, char** arguments) {
  const Library library(arguments[1], 1);
  const SweepDirectory sweep(arguments[2], "play");
  whole_order(library, sweep);
  symmetric_kernels_are_no_calls(library, sweep);
  says_once_what_it_plays(library, sweep);
  unavailable_cells(library, sweep);
  mismatch_stops_for_good(library, sweep);
  channels_left_to_nccl(library, sweep);
  ranks_play_alike(library, sweep);
  overlapping_calls_stop(library, sweep);
  finalize_waits_for_the_call(library, sweep);
  return g_failures;
}
