// Time of one decision made as NVIDIA's example tuner makes it (`plugins/tuner/example/plugin.c`,
// v2.30.7-1), in our own words: rules are scanned from the first one on until one matches, with two
// calls of NCCL's logger for each rule that does not.
//
//   bench_csv_scan      prints JSON
//
// The rules divide sizes and collectives evenly and calls are drawn evenly from them, so a call
// passes half of the rules on average. NCCL's logger is stood in for by one of its form: with
// NCCL_DEBUG off it reads a level and returns ("csv_scan_N_p50_ns"); with INFO on it takes a lock
// and formats the line and its prefix into a buffer ("csv_scan_N_logged_p50_ns"), which here goes
// nowhere: writing it out would come on top.
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "nccl/tuner_abi.h"
#include "vocabulary.h"

namespace {

using namespace dynamiccl;

constexpr int kBatchCalls = 64;
constexpr double kMaxLog2Size = 34;
constexpr int kNumRanks = 16, kNumNodes = 2;
constexpr int kTrace = 5;  // `src/include/nccl_common.h`: TRACE is above INFO (3)

struct Rule {
  int collective;
  std::size_t min_bytes, max_bytes;
  int algorithm, protocol, num_channels;
  int num_nodes, num_ranks, num_pipe_ops, reg_buff;  // -1: any
};

std::atomic<int> g_level{0};
std::mutex g_mutex;
volatile char g_sink;

__attribute__((noinline, format(printf, 5, 6))) void log_line(ncclDebugLogLevel level,
                                                              unsigned long, const char* file,
                                                              int line, const char* format, ...) {
  if (g_level.load(std::memory_order_acquire) < static_cast<int>(level)) return;
  const std::lock_guard<std::mutex> lock(g_mutex);
  char buffer[1024];
  int length = std::snprintf(buffer, sizeof buffer, "host:%d:%d [0] %s:%d NCCL INFO ", getpid(),
                             getpid(), file, line);
  va_list arguments;
  va_start(arguments, format);
  length += std::vsnprintf(buffer + length, sizeof buffer - static_cast<std::size_t>(length),
                           format, arguments);
  va_end(arguments);
  g_sink = buffer[length / 2];
}

const char* const kCollectiveNames[] = {"broadcast", "reduce", "allgather", "reducescatter",
                                        "allreduce"};
const char* const kAlgorithmNames[] = {
    "tree", "ring", "collnet_direct", "collnet_chain", "nvls", "nvls_tree", "pat"};
const char* const kProtocolNames[] = {"ll", "ll128", "simple"};

struct Context {
  std::vector<Rule> rules;
  ncclDebugLogger_t logger = log_line;
};

/// Kept apart, as behind NCCL's function pointer.
__attribute__((noinline)) void answer(const Context& context, int collective,
                                      std::size_t size_bytes, int num_pipe_ops, float* costs,
                                      int reg_buff, int* num_channels) {
  *num_channels = 1;
  for (std::size_t i = 0; i < context.rules.size(); ++i) {
    const Rule& rule = context.rules[i];
    context.logger(static_cast<ncclDebugLogLevel>(kTrace), NCCL_TUNING, __FILE__, __LINE__,
                   "rule %zu: %s, %zu to %zu bytes, %s/%s, %d nodes, %d ranks, %d ops, buffers %d",
                   i, kCollectiveNames[rule.collective], rule.min_bytes, rule.max_bytes,
                   kAlgorithmNames[rule.algorithm], kProtocolNames[rule.protocol], rule.num_nodes,
                   rule.num_ranks, rule.num_pipe_ops, rule.reg_buff);
    const bool matches = rule.collective == collective && size_bytes >= rule.min_bytes &&
                         size_bytes <= rule.max_bytes &&
                         (rule.num_nodes == -1 || rule.num_nodes == kNumNodes) &&
                         (rule.num_ranks == -1 || rule.num_ranks == kNumRanks) &&
                         (rule.num_pipe_ops == -1 || rule.num_pipe_ops == num_pipe_ops) &&
                         (rule.reg_buff == -1 || rule.reg_buff == reg_buff);
    float& cost = costs[rule.algorithm * kNumProtocols + rule.protocol];
    if (matches && cost != kCostIgnore) {
      cost = 0.0F;
      if (rule.num_channels != -1) *num_channels = rule.num_channels;
      return;
    }
    context.logger(NCCL_LOG_INFO, NCCL_TUNING, __FILE__, __LINE__,
                   "no match: collective %d, size %d, nodes %d, ranks %d, ops %d, buffers %d",
                   rule.collective == collective,
                   size_bytes >= rule.min_bytes && size_bytes <= rule.max_bytes,
                   rule.num_nodes == kNumNodes, rule.num_ranks == kNumRanks,
                   rule.num_pipe_ops == num_pipe_ops, rule.reg_buff == reg_buff);
  }
}

/// `count` rules, of which any call matches exactly one.
std::vector<Rule> make_rules(int count) {
  const int per_collective = count / kNumCollectives;
  std::vector<Rule> rules;
  for (int i = 0; i < count; ++i) {
    const int step = i / kNumCollectives;
    const auto edge = [&](int at) {
      return at == 0 ? 0 : static_cast<std::size_t>(std::exp2(kMaxLog2Size * at / per_collective));
    };
    rules.push_back({i % kNumCollectives, edge(step), edge(step + 1) - 1, kRing, i % kNumProtocols,
                     8, kNumNodes, kNumRanks, -1, -1});
  }
  return rules;
}

double now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return 1e9 * static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec);
}

/// Median over batches of the mean time of a call.
double measure(const Context& context, int num_batches) {
  std::mt19937_64 random(20260103);
  std::uniform_real_distribution<double> share(0.0, 1.0);
  std::vector<double> call_ns;
  for (int batch = -num_batches / 20; batch < num_batches; ++batch) {
    int collectives[kBatchCalls];
    std::size_t sizes[kBatchCalls];
    float costs[kBatchCalls][kNumAlgorithms * kNumProtocols];
    for (int i = 0; i < kBatchCalls; ++i) {
      collectives[i] = static_cast<int>(random() % kNumCollectives);
      sizes[i] = static_cast<std::size_t>(std::exp2(kMaxLog2Size * share(random))) - 1;
      std::fill(std::begin(costs[i]), std::end(costs[i]), 10.0F);
    }
    int num_channels = 0;
    const double start = now_ns();
    for (int i = 0; i < kBatchCalls; ++i) {
      answer(context, collectives[i], sizes[i], 1, costs[i], 0, &num_channels);
    }
    if (batch >= 0) call_ns.push_back((now_ns() - start) / kBatchCalls);
  }
  std::nth_element(call_ns.begin(), call_ns.begin() + num_batches / 2, call_ns.end());
  return call_ns[static_cast<std::size_t>(num_batches / 2)];
}

}  // namespace

int main() {
  std::string json;
  for (const int count : {10, 100, 1000}) {
    const Context context = {make_rules(count)};
    for (const bool logged : {false, true}) {
      g_level = logged ? static_cast<int>(NCCL_LOG_INFO) : 0;
      const double p50_ns = measure(context, (logged ? 20'000 : 200'000) / count);
      char field[96];
      std::snprintf(field, sizeof field, "%s\"csv_scan_%d%s_p50_ns\": %.1f",
                    json.empty() ? "" : ", ", count, logged ? "_logged" : "", p50_ns);
      json += field;
    }
  }
  std::printf("{%s}\n", json.c_str());
  return 0;
}
