// What NCCL decides about a group: aggregates, the tuner's answers and channels.
#include <algorithm>
#include <cmath>
#include <map>

#include "tests/job/fake_nccl.h"

using namespace dynamiccl;

namespace {

constexpr std::uint32_t kHashStart = 2166136261U;

std::uint32_t hashed(std::uint32_t hash, std::uint32_t value) { return (hash ^ value) * 16777619U; }

std::size_t traffic(const Task& task) {
  return task.size_bytes * (task.collective == kAllReduce ? 2 : 1);
}

std::string text_of(const TunerQuestion& question) {
  return std::string(collective_name(question.collective)) + " of " +
         std::to_string(question.size_bytes) + " bytes";
}

}  // namespace

std::vector<Aggregate> Communicator::aggregate(const std::vector<Task>& tasks) const {
  std::vector<Task> sorted = tasks;
  std::stable_sort(sorted.begin(), sorted.end(), [](const Task& left, const Task& right) {
    return traffic(left) > traffic(right);
  });
  // Kinds in the order of their largest task; within one, sizes ascend.
  std::vector<std::vector<Task>> kinds;
  std::map<std::pair<int, int>, std::size_t> index_of;
  for (const Task& task : sorted) {
    const std::pair<int, int> kind = {task.collective, static_cast<int>(task.datatype)};
    const auto [found, is_new] = index_of.emplace(kind, kinds.size());
    if (is_new) kinds.emplace_back();
    kinds[found->second].insert(kinds[found->second].begin(), task);
  }
  std::vector<Aggregate> aggregates;
  for (const std::vector<Task>& kind : kinds) {
    std::size_t begin = 0;
    while (begin < kind.size()) {
      std::size_t end = begin + 1;
      while (end < kind.size() && traffic(kind[end]) < 4 * traffic(kind[begin])) ++end;
      Aggregate aggregate = {{kind.begin() + static_cast<std::ptrdiff_t>(begin),
                              kind.begin() + static_cast<std::ptrdiff_t>(end)},
                             {}};
      aggregate.outcome.collective = kind[begin].collective;
      for (const Task& task : aggregate.tasks) aggregate.outcome.size_bytes += task.size_bytes;
      aggregates.push_back(aggregate);
      begin = end;
    }
  }
  return aggregates;
}

std::vector<Aggregate> Communicator::prepare(const std::vector<Task>& tasks) {
  std::vector<Aggregate> aggregates = aggregate(tasks);
  const int per_channel = static_cast<int>(tasks.size() - 1) / model_.num_channels() + 1;
  for (Aggregate& aggregate : aggregates) ask(&aggregate, per_channel);
  return aggregates;
}

TunerAnswer Communicator::ask_once(const TunerQuestion& question, const std::vector<float>& costs) {
  if (tuner_ == nullptr) return {ncclSuccess, costs, 0};
  TunerAnswer answer;
  {
    const Inside inside(this, asking);
    const std::uint64_t begin_ns = now_ns();
    answer = tuner_->ask(tuner_context_, question, costs);
    process_.witness.asked(now_ns() - begin_ns);
  }
  if (aborting_) throw Aborted();
  if (answer.result != ncclSuccess) throw NcclError("getCollInfo", answer.result);
  judge(question, costs, answer);
  return answer;
}

void Communicator::judge(const TunerQuestion& question, const std::vector<float>& before,
                         const TunerAnswer& answer) const {
  const auto complain = [&](const std::string& what) {
    process_.witness.violation(what + " for " + text_of(question));
  };
  for (std::size_t cell = 0; cell < before.size(); ++cell) {
    if (before[cell] == kCostIgnore && answer.costs[cell] != kCostIgnore) {
      complain("wrote into the unavailable cell " + std::to_string(cell));
    }
  }
  const bool is_touched = answer.costs != before || answer.num_channels != 0;
  if (question.num_pipe_ops == 0 && is_touched) complain("answered about symmetric kernels");
  if (answer.num_channels < 0 || answer.num_channels > kMaxChannels) {
    complain("asked for " + std::to_string(answer.num_channels) + " channels");
  }
}

TunerAnswer Communicator::ask(Aggregate* aggregate, int num_pipe_ops) {
  Outcome& outcome = aggregate->outcome;
  if (options_.num_ranks == 1) {  // nobody is asked
    outcome.algorithm = kRing;
    outcome.protocol = kSimple;
    outcome.num_channels = 1;
    return {ncclSuccess, {}, 0};
  }
  const bool fp8 = aggregate->tasks.front().datatype == Datatype::fp8;
  outcome.question = hashed(hashed(kHashStart, static_cast<std::uint32_t>(num_pipe_ops)), fp8);
  for (const Task& task : aggregate->tasks) {
    outcome.question = hashed(outcome.question, static_cast<std::uint32_t>(task.collective));
    outcome.question = hashed(outcome.question, static_cast<std::uint32_t>(task.size_bytes >> 8));
  }
  const std::vector<float> costs =
      model_.costs(outcome.collective, outcome.size_bytes, num_pipe_ops, fp8);
  // Whether the buffers are registered is each rank's own affair.
  const auto reg_buff = static_cast<int>(
      (++calls_ * 2654435761U >> 7 ^ static_cast<std::uint64_t>(options_.rank)) % 2);
  const TunerAnswer answer =
      ask_once({outcome.collective, outcome.size_bytes, num_pipe_ops, reg_buff}, costs);
  const int cell = CostModel::cheapest(answer.costs);
  if (cell < 0) throw NcclError("the choice of an algorithm", ncclInvalidUsage);
  outcome.algorithm = cell / kNumProtocols;
  outcome.protocol = cell % kNumProtocols;
  outcome.acted = answer.costs != costs || answer.num_channels != 0;
  if (answer.num_channels > model_.num_channels() && model_.is_collnet(outcome.algorithm)) {
    process_.witness.violation("asked a CollNet algorithm for more channels than there are");
  }
  const int asked =
      answer.num_channels != 0
          ? answer.num_channels
          : model_.default_channels(outcome.algorithm, outcome.protocol, outcome.size_bytes);
  outcome.num_channels = model_.used_channels(outcome.collective, outcome.algorithm,
                                              outcome.protocol, outcome.size_bytes, asked);
  return answer;
}
