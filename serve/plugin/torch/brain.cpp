// dynamiccl-brain: the policies of artifacts in TorchScript, for the leader of a job's
// communicators, which starts it and asks it (brain/message.h).
//
// A process of its own, so that whatever torch does, is slow at or crashes of takes nothing from
// the job and nothing from its arbiter.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/runtime/graph_executor.h>
#include <torch/csrc/jit/serialization/import.h>

#include <algorithm>
#include <iostream>
#include <map>
#include <stdexcept>

#include "brain/message.h"
#include "file.h"
#include "table.h"

namespace dynamiccl {
namespace {

// --- Questions ----------------------------------------------------------------------------------

bool read_task(JsonReader* json, TimedTask* task) {
  const auto read_call = [&] {
    TimedCall& call = task->calls.emplace_back();
    return json->take('[') &&
           json->numbers(&call.size_bytes, &call.time_us, &call.algorithm, &call.protocol,
                         &call.num_channels, &call.skew_us) &&
           json->take(']');
  };
  return json->take('[') && json->numbers(&task->collective, &task->bin, &task->num_timed) &&
         json->take(',') && json->array(read_call) && json->take(']') && task->collective >= 0 &&
         task->collective < kNumCollectives && task->bin >= 0 && task->bin < kMaxBins &&
         task->calls.size() <= kWindow;
}

bool read_question(const std::string& line, BrainQuestion* question) {
  JsonReader json(line);
  const auto read_next_task = [&] { return read_task(&json, &question->tasks.emplace_back()); };
  const auto read_forgotten = [&] { return json.number(&question->forgotten.emplace_back()); };
  const auto read_field = [&](const std::string& name) {
    if (name == "number") return json.number(&question->number);
    if (name == "forgotten") return json.array(read_forgotten);
    if (name == "brain") return json.number(&question->brain);
    if (name == "artifact") return json.text(&question->artifact);
    if (name == "system") return json.text(&question->system);
    if (name == "num_nodes") return json.number(&question->num_nodes);
    if (name == "num_ranks") return json.number(&question->num_ranks);
    if (name == "table") return json.bytes(&question->table);
    return name == "tasks" && json.array(read_next_task);
  };
  return json.object(read_field) && json.has_ended();
}

// --- Answers ------------------------------------------------------------------------------------

/// What a row of a window holds, in this order (call_columns of the module).
constexpr const char* kColumns =
    "valid size_bytes time_us algorithm protocol num_channels interference skew_us ";
constexpr int kNumColumns = 8;
constexpr double kUnknown = -1.0;  // interference, until the module's Trigger has found it

/// One communicator's policy: `brain.pt` of its artifact (serve/brain_module.py). All of it throws
/// std::exception with a reason.
class Brain {
 public:
  explicit Brain(const BrainQuestion& question) {
    const std::string path = question.artifact + "/brain.pt";
    const File file(path.c_str(), O_RDONLY | O_NONBLOCK | O_NOFOLLOW);
    const char* problem = why_not_ours(file.descriptor(), S_IFREG);
    if (problem != nullptr) throw std::runtime_error(path + ": " + problem);
    // What was looked at, whatever has that name by now.
    script_ = torch::jit::load("/proc/self/fd/" + std::to_string(file.descriptor()), at::kCPU);
    script_.eval();
    if (!script_.find_method("decide")) {
      throw std::runtime_error("brain.pt is of an older release; export the artifact again");
    }
    std::string columns;
    for (const at::IValue& name : script_.attr("call_columns").toListRef()) {
      columns += name.toStringRef() + " ";
    }
    if (columns != kColumns || script_.attr("window_length").toInt() != std::int64_t{kWindow}) {
      throw std::runtime_error("brain.pt wants other facts of a call; export the artifact again");
    }
    const std::int64_t nodes = question.num_nodes, ranks = question.num_ranks;
    const at::IValue found = script_.run_method("find_shape", question.system, nodes, ranks);
    const std::vector<std::int64_t> shape = found.toIntVector();
    if (shape.empty()) {
      throw std::runtime_error("brain.pt knows no " + std::to_string(ranks) + " ranks on " +
                               std::to_string(nodes) + " nodes of " + question.system);
    }
    shape_ = shape.at(0);
    const std::vector<std::int32_t> told(shape.begin() + 1, shape.end());
    header_ = {{},      kFormatVersion, told[0],         told[1],        told[2],
               told[3], told[4],        kNumCollectives, kBinsPerOctave, kEntryBytes};
    std::copy_n(kMagic, sizeof kMagic, header_.magic);
  }

  /// The next table, as a file; the leader checks all of it.
  std::string decide(const std::vector<TimedTask>& tasks) {
    std::vector<std::int64_t> rows, timed;
    std::vector<double> windows;
    for (const TimedTask& task : tasks) {
      const int column = task.bin - header_.first_bin;
      if (task.calls.empty() || column < 0 || column >= header_.num_bins) continue;
      rows.push_back(task.collective * header_.num_bins + column);
      timed.push_back(task.num_timed);
      // Right-aligned, as raw_calls of serve/brain.py has them.
      windows.resize(windows.size() + kNumColumns * (kWindow - task.calls.size()));
      for (const TimedCall& call : task.calls) {
        windows.insert(windows.end(),
                       {1.0, static_cast<double>(call.size_bytes), call.time_us,
                        static_cast<double>(call.algorithm), static_cast<double>(call.protocol),
                        static_cast<double>(call.num_channels), kUnknown, call.skew_us});
      }
    }
    const auto count = static_cast<std::int64_t>(rows.size());
    const at::Tensor row = at::from_blob(rows.data(), {count}, at::kLong);
    const at::Tensor told = at::from_blob(timed.data(), {count}, at::kLong);
    const at::Tensor window =
        at::from_blob(windows.data(), {count, std::int64_t{kWindow}, kNumColumns}, at::kDouble);
    // (collectives x bins, 5): the columns of an Entry.
    const at::Tensor entries = script_.run_method("decide", shape_, row, window, told).toTensor();
    const at::Tensor small = entries.narrow(1, 0, 4), bytes = small.to(at::kChar).contiguous();
    if (!bytes.to(small.scalar_type()).equal(small)) {
      throw std::runtime_error("brain.pt answers with a number outside the vocabulary");
    }
    const at::Tensor chunks = entries.narrow(1, 4, 1).to(at::kInt);
    const at::Tensor file = at::cat({bytes.view(at::kInt), chunks}, 1);
    std::string table(reinterpret_cast<const char*>(&header_), sizeof header_);
    table.append(static_cast<const char*>(file.data_ptr()), file.nbytes());
    const std::uint64_t checksum = fnv1a(table.data(), table.size());
    return table.append(reinterpret_cast<const char*>(&checksum), sizeof checksum);
  }

 private:
  torch::jit::Module script_;
  std::int64_t shape_;
  TableHeader header_ = {};
};

using Brains = std::map<std::uint64_t, Brain>;

std::string decide(Brains* brains, const BrainQuestion& question) {
  for (const std::uint64_t gone : question.forgotten) brains->erase(gone);
  return brains->try_emplace(question.brain, question).first->second.decide(question.tasks);
}

std::string answer(Brains* brains, const std::string& line) {
  BrainQuestion question;
  std::string said;
  try {
    if (!read_question(line, &question)) throw std::runtime_error("its question is impossible");
    said = "\"table\": \"" + hex_of_bytes(decide(brains, question)) + '"';
  } catch (const std::exception& error) {
    const std::string why = error.what();
    said = "\"error\": " + json_of(why.substr(0, why.find('\n')));  // torch adds a backtrace
  }
  return "{\"number\": " + std::to_string(question.number) + ", " + said + "}\n";
}

}  // namespace
}  // namespace dynamiccl

int main() {
  at::set_num_interop_threads(1);
  at::set_num_threads(1);  // the processors are the job's
  const c10::InferenceMode no_gradients;
  // Without it the first calls are profiled and compiled anew, which takes 100 times as long.
  const torch::jit::GraphOptimizerEnabledGuard plain(false);
  dynamiccl::Brains brains;
  for (std::string line; std::getline(std::cin, line);) {
    std::cout << dynamiccl::answer(&brains, line) << std::flush;
  }
}
