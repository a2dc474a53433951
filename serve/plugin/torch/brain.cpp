// dynamiccl-brain: the policies of artifacts in TorchScript, for the leader of a job's
// communicators (arbiter/brain_thread.h), which starts it. Descriptor 0 is a Unix socket that
// listens; each connection is one communicator's (brain/message.h).
//
// A process of its own, so that whatever torch does, is slow at or crashes of takes nothing from
// the job and nothing from its arbiter.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>
#include <poll.h>
#include <sys/socket.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/runtime/graph_executor.h>
#include <torch/csrc/jit/serialization/import.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string_view>
#include <thread>

#include "brain/message.h"
#include "file.h"
#include "table.h"

namespace dynamiccl {
namespace {

// --- Questions ----------------------------------------------------------------------------------

/// Takes values from the front of a message; false where it has too few.
template <typename Value>
bool take(std::string_view* from, Value* to, std::size_t count = 1) {
  const std::size_t size = count * sizeof(Value);
  if (size > from->size()) return false;
  std::copy_n(from->data(), size, reinterpret_cast<char*>(to));
  from->remove_prefix(size);
  return true;
}

/// A text, or the bytes of a file, of at most so many bytes.
template <typename Text>
bool take_text(std::string_view* from, std::size_t most, Text* text) {
  std::uint32_t size = 0;
  if (!take(from, &size) || size > most) return false;
  text->resize(size);
  return take(from, text->data(), size);
}

bool is_sound(const TimedCall& call) {
  return call.size_bytes > 0 && call.size_bytes >> kMaxSizeBits == 0 &&
         std::isfinite(call.time_us) && call.time_us > 0.0 && std::isfinite(call.skew_us) &&
         std::isfinite(call.interference) && call.algorithm >= kAuto &&
         call.algorithm < kNumAlgorithms && call.protocol >= kAuto &&
         call.protocol < kNumProtocols && call.num_channels >= 0 &&
         call.num_channels <= kMaxChannels;
}

bool take_task(std::string_view* from, TimedTask* task) {
  std::uint32_t num_calls = 0;
  const bool is_task = take(from, &task->collective) && take(from, &task->bin) &&
                       take(from, &num_calls) && task->collective >= 0 &&
                       task->collective < kNumCollectives && task->bin >= 0 &&
                       task->bin < kMaxBins && num_calls <= kWindow;
  if (!is_task) return false;
  task->calls.resize(num_calls);
  if (!take(from, task->calls.data(), num_calls)) return false;
  if (num_calls > 0) task->num_timed = task->calls.back().number;
  return std::all_of(task->calls.begin(), task->calls.end(), is_sound);
}

bool read_ask(std::string_view body, BrainAsk* ask) {
  std::uint32_t num_tasks = 0;
  bool is_whole = take(&body, &ask->num_nodes) && take(&body, &ask->num_ranks) &&
                  take_text(&body, kMaxArtifactBytes, &ask->artifact) &&
                  take_text(&body, kMaxSystemBytes, &ask->system) &&
                  take_text(&body, kMaxFileBytes, &ask->table) && take(&body, &num_tasks);
  for (; is_whole && num_tasks > 0; --num_tasks) {
    is_whole = take_task(&body, &ask->tasks.emplace_back());
  }
  return is_whole && body.empty();
}

// --- Answers ------------------------------------------------------------------------------------

/// What a row of a window holds, in this order (call_columns of the module).
constexpr const char* kColumns =
    "valid size_bytes time_us algorithm protocol num_channels interference skew_us ";
constexpr int kNumColumns = 8;

/// One communicator's policy: `brain.pt` of its artifact (serve/brain_module.py). All of it throws
/// std::exception with a reason.
class Brain {
 public:
  /// Loads the module and decides the cold table, which is the warm-up as well.
  explicit Brain(const BrainAsk& ask) {
    const std::string path = ask.artifact + "/brain.pt";
    const File file(path.c_str(), O_RDONLY | O_NONBLOCK | O_NOFOLLOW);
    const char* problem = nullptr;
    if (!file.is_open()) problem = errno == ELOOP ? "it is a symbolic link" : std::strerror(errno);
    if (problem == nullptr) problem = why_not_ours(file.descriptor(), S_IFREG);
    if (problem != nullptr) throw std::runtime_error(path + ": " + problem);
    // What was looked at, whatever has that name by now.
    script_ = torch::jit::load("/proc/self/fd/" + std::to_string(file.descriptor()), at::kCPU);
    script_.eval();
    std::string columns;
    for (const at::IValue& name : script_.attr("call_columns").toListRef()) {
      columns += name.toStringRef() + " ";
    }
    if (columns != kColumns || script_.attr("window_length").toInt() != std::int64_t{kWindow}) {
      throw std::runtime_error("brain.pt wants other facts of a call: export it again");
    }
    const std::int64_t num_nodes = ask.num_nodes, num_ranks = ask.num_ranks;
    shape_ = script_.run_method("find_shape", ask.system, num_nodes, num_ranks).toInt();
    if (shape_ < 0) {
      throw std::runtime_error("brain.pt knows no " + std::to_string(num_ranks) + " ranks on " +
                               std::to_string(num_nodes) + " nodes of " + ask.system);
    }
    const std::vector<std::int64_t> shape = script_.run_method("shape", shape_).toIntVector();
    if (shape.size() != 5 || shape[3] < 0 || shape[4] < 1 || shape[3] + shape[4] > kMaxBins) {
      throw std::runtime_error("brain.pt has an impossible shape");
    }
    const std::vector<std::int32_t> told(shape.begin(), shape.end());
    header_ = {{},      kFormatVersion, told[0],         told[1],        told[2],
               told[3], told[4],        kNumCollectives, kBinsPerOctave, kEntryBytes};
    std::copy_n(kMagic, sizeof kMagic, header_.magic);
    cold_ = script_.run_method("cold", shape_).toTensor();
    if (cold_.sizes() != at::IntArrayRef({kNumCollectives * shape[4], 5})) {
      throw std::runtime_error("brain.pt answers with something that is no table");
    }
  }

  /// The next table, as a file.
  std::string decide(const std::vector<TimedTask>& tasks) {
    std::vector<std::int64_t> rows, timed;
    std::vector<double> windows;
    for (const TimedTask& task : tasks) {
      const int column = task.bin - header_.first_bin;
      if (task.calls.empty() || column < 0 || column >= header_.num_bins) continue;
      rows.push_back(task.collective * header_.num_bins + column);
      timed.push_back(task.num_timed);
      // Right-aligned, as history_arrays has them.
      windows.resize(windows.size() + kNumColumns * (kWindow - task.calls.size()));
      for (const TimedCall& call : task.calls) {
        windows.insert(windows.end(),
                       {1.0, static_cast<double>(call.size_bytes), call.time_us,
                        static_cast<double>(call.algorithm), static_cast<double>(call.protocol),
                        static_cast<double>(call.num_channels), call.interference, call.skew_us});
      }
    }
    at::Tensor entries = cold_;
    if (!rows.empty()) {
      const auto count = static_cast<std::int64_t>(rows.size());
      const at::Tensor row = at::from_blob(rows.data(), {count}, at::kLong);
      const at::Tensor told = at::from_blob(timed.data(), {count}, at::kLong);
      at::Tensor window =
          at::from_blob(windows.data(), {count, std::int64_t{kWindow}, kNumColumns}, at::kDouble);
      if (script_.find_method("watch")) {  // not in older artifacts
        window = script_.run_method("watch", row, window, told).toTensor();
      }
      const at::Tensor warm = script_.run_method("warm", shape_, row, window).toTensor();
      entries = cold_.index_copy(0, row, warm);
    }
    const at::Tensor small = entries.narrow(1, 0, 4), bytes = small.to(at::kChar).contiguous();
    if (!bytes.to(small.scalar_type()).equal(small)) {
      throw std::runtime_error("brain.pt answers with a number outside the vocabulary");
    }
    const at::Tensor chunks = entries.narrow(1, 4, 1).to(at::kInt);
    const at::Tensor file = at::cat({bytes.view(at::kInt), chunks}, 1);
    std::string table;
    put(&table, header_);
    table.append(static_cast<const char*>(file.data_ptr()), file.nbytes());
    put(&table, fnv1a(table.data(), table.size()));
    return table;
  }

 private:
  torch::jit::Module script_;
  std::int64_t shape_;
  TableHeader header_ = {};
  at::Tensor cold_;  // (collectives x bins, 5): the columns of an Entry
};

// --- Leaders ------------------------------------------------------------------------------------

/// A thread: answers the questions of one communicator.
void serve(int socket) {
  at::set_num_threads(1);  // the processors are the job's; of this thread, as OpenMP counts
  const c10::InferenceMode no_gradients;
  // Without it the first calls are profiled and compiled anew, which takes 100 times as long.
  const torch::jit::GraphOptimizerEnabledGuard plain(false);
  std::unique_ptr<Brain> brain;
  MessageHeader header;
  std::string body;
  while (receive_message(socket, &header, &body) == nullptr) {
    MessageKind kind = MessageKind::kTable;
    try {
      BrainAsk ask;
      if (header.kind != MessageKind::kAsk || !read_ask(body, &ask)) {
        throw std::runtime_error("its question is impossible");
      }
      if (brain == nullptr) brain = std::make_unique<Brain>(ask);
      body = brain->decide(ask.tasks);
    } catch (const std::exception& error) {
      body = error.what();
      body = body.substr(0, body.find('\n'));  // torch adds a backtrace
      kind = MessageKind::kError;
    }
    if (send_message(socket, kind, header.number, body) != nullptr) break;
  }
  close(socket);
}

}  // namespace
}  // namespace dynamiccl

int main() {
  at::set_num_interop_threads(1);
  for (;;) {
    const int socket = accept4(0, nullptr, nullptr, SOCK_CLOEXEC);
    if (socket >= 0 && dynamiccl::why_not_peer(socket) == nullptr) {  // its name is no secret
      std::thread(dynamiccl::serve, socket).detach();
    } else if (socket >= 0) {
      close(socket);
    } else if (errno == ENOTSOCK || errno == EINVAL || errno == EBADF) {
      std::fputs("dynamiccl-brain is started by dynamiccl-arbiter, in mode adaptive\n", stderr);
      return 2;
    } else {
      poll(nullptr, 0, 100);  // it has no descriptor left, and one more waits all the time
    }
  }
}
