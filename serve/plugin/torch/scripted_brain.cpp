// All code that handles tensors: C arrays in, table entries out.
#include "torch/scripted_brain.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/serialization/import.h>

#include <cstring>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <string>

#include "file.h"
#include "table.h"

namespace dynamiccl {

struct ScriptedBrain::Module {
  torch::jit::Module script;
  std::int64_t shape;
};

namespace {

constexpr int kColumns = 8;
constexpr const char* kColumnNames[kColumns] = {"valid",        "size_bytes", "time_us",
                                                "algorithm",    "protocol",   "num_channels",
                                                "interference", "skew_us"};

std::string read_module(const std::string& path) {
  const File file(path.c_str(), O_RDONLY | O_NONBLOCK | O_NOFOLLOW);
  const char* problem = nullptr;
  if (!file.is_open()) problem = errno == ELOOP ? "it is a symbolic link" : std::strerror(errno);
  if (problem == nullptr) problem = why_not_ours(file.descriptor(), S_IFREG);
  if (problem != nullptr) throw std::runtime_error(path + ": " + problem);
  std::string bytes;
  std::vector<std::uint8_t> part(1 << 16);
  for (ssize_t got; (got = file.read_all(part.data(), part.size())) > 0;) {
    bytes.append(part.begin(), part.begin() + got);
  }
  return bytes;
}

void check_columns(const torch::jit::Module& script) {
  const auto names = script.attr("call_columns").toList();
  bool same =
      names.size() == kColumns && script.attr("window_length").toInt() == std::int64_t{kWindow};
  for (int i = 0; same && i < kColumns; ++i) {
    same = names.get(static_cast<std::size_t>(i)).toStringRef() == kColumnNames[i];
  }
  if (!same) throw std::runtime_error("brain.pt wants other facts of a call: export it again");
}

std::vector<Entry> entries_of(const at::Tensor& answer, std::int64_t num_rows) {
  const at::Tensor rows = answer.to(at::kCPU, at::kInt).contiguous();
  if (rows.dim() != 2 || rows.size(0) != num_rows || rows.size(1) != 5) {
    throw std::runtime_error("brain.pt answers with something that is no table");
  }
  const std::int32_t* values = rows.data_ptr<std::int32_t>();
  std::vector<Entry> entries(static_cast<std::size_t>(num_rows));
  for (std::size_t i = 0; i < entries.size(); ++i, values += 5) {
    for (int column = 0; column < 4; ++column) {
      if (values[column] < -128 || values[column] > 127) {
        throw std::runtime_error("brain.pt answers with a number outside the vocabulary");
      }
    }
    entries[i] = {static_cast<std::int8_t>(values[0]), static_cast<std::int8_t>(values[1]),
                  static_cast<std::int8_t>(values[2]), static_cast<std::int8_t>(values[3]),
                  values[4]};
  }
  return entries;
}

/// Calls are right-aligned in the window, as history_arrays has them.
void append_window(const TimedTask& task, std::vector<double>* values) {
  values->resize(values->size() + std::size_t{kColumns} * (kWindow - task.calls.size()));
  for (const TimedCall& call : task.calls) {
    for (const double value :
         {1.0, static_cast<double>(call.size_bytes), call.time_us,
          static_cast<double>(call.algorithm), static_cast<double>(call.protocol),
          static_cast<double>(call.num_channels), call.interference, call.skew_us}) {
      values->push_back(value);
    }
  }
}

/// A table file of this shape (num_nodes, num_ranks, ranks_per_node, first_bin, num_bins) and of
/// these entries, [collective][bin].
std::vector<std::uint8_t> table_bytes(const std::vector<std::int64_t>& shape,
                                      const std::vector<Entry>& entries) {
  TableHeader header = {};
  std::memcpy(header.magic, kMagic, sizeof kMagic);
  header.version = kFormatVersion;
  std::int32_t* const fields[] = {&header.num_nodes, &header.num_ranks, &header.ranks_per_node,
                                  &header.first_bin, &header.num_bins};
  for (std::size_t i = 0; i < shape.size(); ++i) *fields[i] = static_cast<std::int32_t>(shape[i]);
  header.num_collectives = kNumCollectives;
  header.bins_per_octave = kBinsPerOctave;
  header.entry_bytes = kEntryBytes;
  const std::size_t size = sizeof header + entries.size() * sizeof(Entry);
  std::vector<std::uint8_t> bytes(size + kChecksumBytes);
  std::memcpy(bytes.data(), &header, sizeof header);
  std::memcpy(bytes.data() + sizeof header, entries.data(), size - sizeof header);
  const std::uint64_t checksum = fnv1a(bytes.data(), size);
  std::memcpy(bytes.data() + size, &checksum, sizeof checksum);
  return bytes;
}

}  // namespace

ScriptedBrain::ScriptedBrain(const BrainAsk& ask) : module_(new Module) {
  std::istringstream bytes(read_module(ask.artifact + "/brain.pt"));
  module_->script = torch::jit::load(bytes, at::kCPU);
  module_->script.eval();
  check_columns(module_->script);
  module_->shape = module_->script
                       .run_method("find_shape", ask.system, std::int64_t{ask.num_nodes},
                                   std::int64_t{ask.num_ranks})
                       .toInt();
  if (module_->shape < 0) {
    throw std::runtime_error("brain.pt knows no " + std::to_string(ask.num_ranks) + " ranks on " +
                             std::to_string(ask.num_nodes) + " nodes of " + ask.system);
  }
  shape_ = module_->script.run_method("shape", module_->shape).toIntVector();
  if (shape_.size() != 5 || shape_[3] < 0 || shape_[4] < 1 || shape_[3] + shape_[4] > kMaxBins) {
    throw std::runtime_error("brain.pt has an impossible shape");
  }
  cold_ = entries_of(module_->script.run_method("cold", module_->shape).toTensor(),
                     kNumCollectives * shape_[4]);
}

ScriptedBrain::~ScriptedBrain() = default;

std::vector<std::uint8_t> ScriptedBrain::decide(const std::vector<TimedTask>& tasks) {
  std::vector<std::int64_t> rows;
  std::vector<std::int64_t> timed;
  std::vector<double> calls;
  for (const TimedTask& task : tasks) {
    const std::int64_t column = task.bin - shape_[3];
    if (task.calls.empty() || column < 0 || column >= shape_[4]) continue;
    rows.push_back(task.collective * shape_[4] + column);
    timed.push_back(task.num_timed);
    append_window(task, &calls);
  }
  std::vector<Entry> entries = cold_;
  if (!rows.empty()) {
    const auto num_rows = static_cast<std::int64_t>(rows.size());
    const at::Tensor row = at::from_blob(rows.data(), {num_rows}, at::kLong);
    at::Tensor window =
        at::from_blob(calls.data(), {num_rows, std::int64_t{kWindow}, kColumns}, at::kDouble);
    if (module_->script.find_method("watch")) {  // not in older artifacts
      const at::Tensor told = at::from_blob(timed.data(), {num_rows}, at::kLong);
      window = module_->script.run_method("watch", row, window, told).toTensor();
    }
    const std::vector<Entry> warm = entries_of(
        module_->script.run_method("warm", module_->shape, row, window).toTensor(), num_rows);
    for (std::size_t i = 0; i < rows.size(); ++i) {
      entries[static_cast<std::size_t>(rows[i])] = warm[i];
    }
  }
  return table_bytes(shape_, entries);
}

}  // namespace dynamiccl
