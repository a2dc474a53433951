// All sizes are checked before anything is read; see the header for the layout.
#include "brain/message.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace dynamiccl {
namespace {

constexpr std::uint32_t kVersion = 1;
constexpr char kMagicText[] = {'D', 'C', 'B', 'R', 'A', 'I', 'N', 0};
enum Kind : std::uint32_t { kAsk = 1, kTable = 2, kKeep = 3, kError = 4 };
constexpr std::size_t kMaxTasks = std::size_t{kNumCollectives} * kMaxBins;

class Writer {
 public:
  Writer(Kind kind, std::uint64_t number) : bytes_(kBrainLengthBytes, '\0') {
    bytes_.append(kMagicText, sizeof kMagicText);
    put(kVersion, 4);
    put(kind, 4);
    put(number, 8);
  }

  void put(std::uint64_t value, int size) {
    for (int i = 0; i < size; ++i) bytes_ += static_cast<char>(value >> (8 * i) & 0xff);
  }
  void put_int32(std::int32_t value) { put(static_cast<std::uint32_t>(value), 4); }
  void put_double(double value) {
    std::uint64_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    put(bits, 8);
  }
  void put_text(const std::string& text) {
    put(text.size(), 4);
    bytes_ += text;
  }
  void put_rest(const void* bytes, std::size_t size) {
    bytes_.append(static_cast<const char*>(bytes), size);
  }

  std::string finish() {
    const std::size_t size = bytes_.size() - kBrainLengthBytes;
    for (std::size_t i = 0; i < kBrainLengthBytes; ++i) {
      bytes_[i] = static_cast<char>(size >> (8 * i) & 0xff);
    }
    return bytes_;
  }

 private:
  std::string bytes_;
};

/// Reads from the front; zeros and a mark once there is no more.
class Reader {
 public:
  explicit Reader(const std::string& bytes) : bytes_(bytes) {}

  const char* header(std::uint32_t* kind, std::uint64_t* number) {
    if (take(sizeof kMagicText) != std::string(kMagicText, sizeof kMagicText)) {
      return "it sends something that is no message";
    }
    if (get(4) != kVersion) return "it speaks another version";
    *kind = static_cast<std::uint32_t>(get(4));
    *number = get(8);
    return is_over_ ? "it sends something that is no message" : nullptr;
  }
  std::string take(std::size_t size) {
    is_over_ |= size > bytes_.size() - at_;
    if (is_over_) return "";
    at_ += size;
    return bytes_.substr(at_ - size, size);
  }
  std::uint64_t get(std::size_t size) {
    const std::string taken = take(size);
    return read_unsigned(reinterpret_cast<const std::uint8_t*>(taken.data()), taken.size());
  }
  std::int32_t get_int32() { return static_cast<std::int32_t>(get(4)); }
  std::int8_t get_int8() { return static_cast<std::int8_t>(get(1)); }
  double get_double() {
    const std::uint64_t bits = get(8);
    double value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }
  std::string rest() { return take(bytes_.size() - at_); }

  /// Whether all of it was read, and no more.
  bool is_done() const { return !is_over_ && at_ == bytes_.size(); }
  bool is_over() const { return is_over_; }

 private:
  const std::string& bytes_;
  std::size_t at_ = 0;
  bool is_over_ = false;
};

bool is_sound(const TimedCall& call) {
  return call.size_bytes > 0 && call.size_bytes >> kMaxSizeBits == 0 &&
         std::isfinite(call.time_us) && call.time_us > 0.0 && std::isfinite(call.skew_us) &&
         std::isfinite(call.interference) && call.algorithm >= kAuto &&
         call.algorithm < kNumAlgorithms && call.protocol >= kAuto &&
         call.protocol < kNumProtocols && call.num_channels >= 0 &&
         call.num_channels <= kMaxChannels;
}

TimedTask read_task(Reader* reader) {
  TimedTask task;
  task.collective = reader->get_int32();
  task.bin = reader->get_int32();
  const std::uint64_t num_calls = std::min<std::uint64_t>(reader->get(4), kWindow + 1);
  bool is_in_order = num_calls > 0;
  std::uint64_t before = 0;  // a lone call is the first of its key, or its number is not known
  for (std::uint64_t i = 0; i < num_calls && !reader->is_over(); ++i) {
    TimedCall call;
    call.size_bytes = reader->get(8);
    call.time_us = reader->get_double();
    call.skew_us = reader->get_double();
    call.interference = reader->get_double();
    call.algorithm = reader->get_int8();
    call.protocol = reader->get_int8();
    call.num_channels = reader->get_int8();
    const std::uint64_t number = reader->get(1);
    is_in_order &= (i == 0 && num_calls > 1) || (number - before) % 256 == 1;
    before = number;
    task.calls.push_back(call);
  }
  if (is_in_order) task.num_timed = static_cast<std::int64_t>(before);
  return task;
}

}  // namespace

std::string encode_ask(std::uint64_t number, const BrainAsk& ask) {
  Writer writer(kAsk, number);
  writer.put(ask.num_nodes, 4);
  writer.put(ask.num_ranks, 4);
  writer.put_text(ask.artifact);
  writer.put_text(ask.system);
  writer.put_text({ask.table.begin(), ask.table.end()});
  writer.put(ask.tasks.size(), 4);
  for (const TimedTask& task : ask.tasks) {
    writer.put_int32(task.collective);
    writer.put_int32(task.bin);
    writer.put(task.calls.size(), 4);
    auto back = static_cast<std::int64_t>(task.calls.size());
    for (const TimedCall& call : task.calls) {
      --back;
      writer.put(call.size_bytes, 8);
      writer.put_double(call.time_us);
      writer.put_double(call.skew_us);
      writer.put_double(call.interference);
      writer.put(static_cast<std::uint8_t>(call.algorithm), 1);
      writer.put(static_cast<std::uint8_t>(call.protocol), 1);
      writer.put(static_cast<std::uint8_t>(call.num_channels), 1);
      writer.put(task.num_timed > back ? static_cast<std::uint64_t>(task.num_timed - back) : 0, 1);
    }
  }
  return writer.finish();
}

const char* decode_ask(const std::string& bytes, std::uint64_t* number, BrainAsk* ask) {
  Reader reader(bytes);
  std::uint32_t kind = 0;
  if (const char* problem = reader.header(&kind, number)) return problem;
  if (kind != kAsk) return "it sends something that is no question";
  ask->num_nodes = static_cast<std::uint32_t>(reader.get(4));
  ask->num_ranks = static_cast<std::uint32_t>(reader.get(4));
  ask->artifact = reader.take(reader.get(4));
  ask->system = reader.take(reader.get(4));
  const std::string table = reader.take(reader.get(4));
  ask->table.assign(table.begin(), table.end());
  ask->tasks.clear();
  for (std::uint64_t left = std::min(reader.get(4), std::uint64_t{kMaxTasks + 1});
       left > 0 && !reader.is_over(); --left) {
    ask->tasks.push_back(read_task(&reader));
    const TimedTask& task = ask->tasks.back();
    const bool is_task = task.collective >= 0 && task.collective < kNumCollectives &&
                         task.bin >= 0 && task.bin < kMaxBins && task.calls.size() <= kWindow &&
                         std::all_of(task.calls.begin(), task.calls.end(), is_sound);
    if (!is_task && !reader.is_over()) return "its history is impossible";
  }
  const bool fits = ask->artifact.size() <= kMaxArtifactBytes &&
                    ask->system.size() <= kMaxSystemBytes && ask->tasks.size() <= kMaxTasks;
  return reader.is_done() && fits ? nullptr : "its question has another length";
}

std::string encode_answer(std::uint64_t number, const BrainAnswer& answer) {
  const bool is_error = !answer.problem.empty();
  Writer writer(is_error ? kError : answer.table.empty() ? kKeep : kTable, number);
  if (is_error) {
    writer.put_rest(answer.problem.data(), answer.problem.size());
  } else {
    writer.put_rest(answer.table.data(), answer.table.size());
  }
  return writer.finish();
}

const char* decode_answer(const std::string& bytes, std::uint64_t number, BrainAnswer* answer) {
  *answer = BrainAnswer{};
  Reader reader(bytes);
  std::uint32_t kind = 0;
  std::uint64_t told = 0;
  if (const char* problem = reader.header(&kind, &told)) return problem;
  if (told != number) return "it answers another question";
  const std::string body = reader.rest();
  if (kind == kError) {
    answer->problem = body.empty() ? "it gives no reason" : body;
    for (char& c : answer->problem) {
      if (c < 0x20 || c > 0x7e) c = '?';  // it becomes a line of NCCL's log
    }
    return nullptr;
  }
  answer->table.assign(body.begin(), body.end());
  const bool fits = kind == kKeep ? body.empty()
                                  : kind == kTable && !body.empty() && body.size() <= kMaxFileBytes;
  return fits ? nullptr : "it sends something that is no message";
}

}  // namespace dynamiccl
