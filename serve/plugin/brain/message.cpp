// All sizes are checked before anything is written or read; see the header for the layout.
#include "brain/message.h"

#include <cmath>
#include <cstring>

#include "file.h"

namespace dynamiccl {
namespace {

/// Appends to a buffer that has room for every message that passes the checks below.
struct Writer {
  std::uint8_t* end;

  void put(std::uint64_t value, int size) noexcept {
    for (int i = 0; i < size; ++i) *end++ = static_cast<std::uint8_t>(value >> (8 * i));
  }
  void put_int32(std::int32_t value) noexcept { put(static_cast<std::uint32_t>(value), 4); }
  void put_double(double value) noexcept {
    std::uint64_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    put(bits, 8);
  }
  void put_bytes(const void* bytes, std::size_t size) noexcept {
    put(size, 4);
    if (size > 0) std::memcpy(end, bytes, size);
    end += size;
  }
};

bool call_is_sound(const dynamiccl_call& call) noexcept {
  return std::isfinite(call.time_us) && std::isfinite(call.skew_us) &&
         std::isfinite(call.interference);
}

bool task_is_sound(const dynamiccl_task& task) noexcept {
  if (task.collective < 0 || task.collective >= kNumCollectives || task.bin < 0 ||
      task.bin >= kMaxBins || task.num_calls < 0 || task.num_calls > DYNAMICCL_WINDOW) {
    return false;
  }
  for (int i = 0; i < task.num_calls; ++i) {
    if (!call_is_sound(task.calls[i])) return false;
  }
  return true;
}

bool history_is_sound(const dynamiccl_history& history) noexcept {
  if (history.num_tasks < 0 || static_cast<std::size_t>(history.num_tasks) > kMaxTasks ||
      history.table_bytes > kMaxFileBytes) {
    return false;
  }
  for (int i = 0; i < history.num_tasks; ++i) {
    if (!task_is_sound(history.tasks[i])) return false;
  }
  return true;
}

void put_task(const dynamiccl_task& task, Writer* writer) noexcept {
  writer->put_int32(task.collective);
  writer->put_int32(task.bin);
  writer->put_int32(task.num_calls);
  for (int i = 0; i < task.num_calls; ++i) {
    const dynamiccl_call& call = task.calls[i];
    writer->put(call.size_bytes, 8);
    writer->put_double(call.time_us);
    writer->put_double(call.skew_us);
    writer->put_double(call.interference);
    writer->put(static_cast<std::uint8_t>(call.algorithm), 1);
    writer->put(static_cast<std::uint8_t>(call.protocol), 1);
    writer->put(static_cast<std::uint8_t>(call.num_channels), 1);
    // Number of the last call is task.num_timed; 0: not known.
    const auto back = static_cast<std::uint32_t>(task.num_calls - 1 - i);
    writer->put(task.num_timed > back ? task.num_timed - back : 0, 1);
  }
}

}  // namespace

std::size_t write_ask(std::uint64_t number, const dynamiccl_brain_config& config,
                      const dynamiccl_history& history, std::uint8_t* buffer) noexcept {
  const std::size_t artifact_bytes = strnlen(config.artifact, kMaxArtifactBytes + 1);
  const std::size_t system_bytes = strnlen(config.system, kMaxSystemBytes + 1);
  if (artifact_bytes > kMaxArtifactBytes || system_bytes > kMaxSystemBytes ||
      !history_is_sound(history)) {
    return 0;
  }
  Writer writer = {buffer + kBrainLengthBytes};
  std::memcpy(writer.end, kBrainMagic, sizeof kBrainMagic);
  writer.end += sizeof kBrainMagic;
  writer.put(kBrainMessageVersion, 4);
  writer.put(kBrainAsk, 4);
  writer.put(number, 8);
  writer.put_int32(config.num_nodes);
  writer.put_int32(config.num_ranks);
  writer.put_bytes(config.artifact, artifact_bytes);
  writer.put_bytes(config.system, system_bytes);
  writer.put_bytes(history.table, history.table != nullptr ? history.table_bytes : 0);
  writer.put_int32(history.num_tasks);
  for (int i = 0; i < history.num_tasks; ++i) put_task(history.tasks[i], &writer);
  const auto size = static_cast<std::size_t>(writer.end - buffer);
  Writer{buffer}.put(size - kBrainLengthBytes, 4);
  return size;
}

const char* read_answer(const std::uint8_t* bytes, std::size_t size, std::uint64_t number,
                        BrainAnswer* answer) noexcept {
  if (size < kBrainHeaderBytes || size > kMaxAnswerBytes ||
      std::memcmp(bytes, kBrainMagic, sizeof kBrainMagic) != 0) {
    return "it answers something that is no message";
  }
  if (read_unsigned(bytes + 8, 4) != kBrainMessageVersion) return "it speaks another version";
  if (read_unsigned(bytes + 16, 8) != number) return "it answers another question";
  answer->kind = static_cast<std::uint32_t>(read_unsigned(bytes + 12, 4));
  answer->body = bytes + kBrainHeaderBytes;
  answer->body_bytes = size - kBrainHeaderBytes;
  const bool fits = answer->kind == kBrainKeep    ? answer->body_bytes == 0
                    : answer->kind == kBrainTable ? answer->body_bytes > 0
                                                  : answer->kind == kBrainError;
  return fits ? nullptr : "it answers something that is no message";
}

}  // namespace dynamiccl
