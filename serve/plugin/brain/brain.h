// The leader's brain of any kind; opened when first needed, its answers are always checked.
#pragma once

#include <cstddef>
#include <cstdint>

#include "brain/brain_abi.h"

namespace dynamiccl {

/// File name of the TorchScript runtime, which lies beside this library.
inline constexpr const char* kTorchRuntime = "libdynamiccl-torch.so";

/// The brain of one communicator. Not thread-safe; used by the brain thread.
class BrainHandle {
 public:
  BrainHandle() = default;
  ~BrainHandle() { close(); }
  BrainHandle(const BrainHandle&) = delete;
  BrainHandle& operator=(const BrainHandle&) = delete;

  /// Open the process that listens at `config.socket` or, where that is null, the TorchScript
  /// runtime beside this library. The latter takes about a second, to load torch. Returns false
  /// with a reason: the table in force stays.
  bool open(const dynamiccl_brain_config& config, char* reason, std::size_t reason_bytes) noexcept;

  /// Open a brain of the library at `path`, which stays loaded for good.
  bool open_from(const char* path, const dynamiccl_brain_config& config, char* reason,
                 std::size_t reason_bytes) noexcept;

  bool is_open() const noexcept { return kind_ != nullptr; }

  /// `TorchScript` or `socket`; empty when closed.
  const char* name() const noexcept { return kind_ != nullptr ? kind_->name : ""; }

  /// Ask for the next table. True with `*table_bytes` 0 means: keep the one in force. The bytes are
  /// not checked here: pass them to decode_table.
  bool decide(const dynamiccl_history& history, std::uint8_t* table, std::size_t capacity,
              std::size_t* table_bytes, char* reason, std::size_t reason_bytes) noexcept;

  void close() noexcept;

 private:
  bool open_kind(const dynamiccl_brain* kind, const dynamiccl_brain_config& config, char* reason,
                 std::size_t reason_bytes) noexcept;

  const dynamiccl_brain* kind_ = nullptr;
  void* brain_ = nullptr;
};

}  // namespace dynamiccl
