// libdynamiccl-torch.so: TorchScript behind the seam of brain/brain_abi.h. Opened by the leader of
// a communicator alone, and apart from the plugin, whose core must load where there is no torch.
#include <cstring>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>

#include "brain/brain_abi.h"
#include "torch/process.h"
#include "torch/scripted_brain.h"

namespace {

using dynamiccl::ScriptedBrain;

void tell(const std::string& message, char* reason, std::size_t reason_bytes) {
  if (reason == nullptr || reason_bytes == 0) return;
  const std::string line = message.substr(0, message.find('\n'));  // torch adds a backtrace
  const std::size_t length = line.copy(reason, reason_bytes - 1);
  reason[length] = '\0';
}

/// Nothing that C++ throws may cross into the plugin, which is compiled without exceptions.
template <typename Work>
int guarded(char* reason, std::size_t reason_bytes, const Work& work) noexcept {
  try {
    work();
    return 0;
  } catch (const std::exception& error) {
    tell(error.what(), reason, reason_bytes);
  } catch (...) {
    tell("an unknown error", reason, reason_bytes);
  }
  return 1;
}

int open_brain(const dynamiccl_brain_config* config, void** brain, char* reason,
               std::size_t reason_bytes) {
  return guarded(reason, reason_bytes, [&] {
    if (config == nullptr || brain == nullptr || config->artifact == nullptr ||
        config->system == nullptr) {
      throw std::runtime_error("an argument is missing");
    }
    *brain = nullptr;
    const std::string mismatch = dynamiccl::torch_mismatch();
    if (!mismatch.empty()) throw std::runtime_error(mismatch);
    dynamiccl::run_beside_job([&] { *brain = std::make_unique<ScriptedBrain>(*config).release(); });
  });
}

int decide(void* brain, const dynamiccl_history* history, std::uint8_t* table, std::size_t capacity,
           std::size_t* table_bytes, char* reason, std::size_t reason_bytes) {
  return guarded(reason, reason_bytes, [&] {
    if (brain == nullptr || history == nullptr || table == nullptr || table_bytes == nullptr) {
      throw std::runtime_error("an argument is missing");
    }
    *table_bytes = 0;
    std::vector<std::uint8_t> bytes;
    dynamiccl::run_beside_job(
        [&] { bytes = static_cast<ScriptedBrain*>(brain)->decide(*history); });
    if (bytes.size() > capacity) throw std::runtime_error("the table does not fit the buffer");
    std::memcpy(table, bytes.data(), bytes.size());
    *table_bytes = bytes.size();
  });
}

void close_brain(void* brain) {
  guarded(nullptr, 0, [&] {
    if (brain == nullptr) return;
    dynamiccl::run_beside_job([&] { delete static_cast<ScriptedBrain*>(brain); });
  });
}

constexpr dynamiccl_brain kBrain = {DYNAMICCL_BRAIN_VERSION, "TorchScript", open_brain, decide,
                                    close_brain};

}  // namespace

extern "C" __attribute__((visibility("default"))) const dynamiccl_brain* dynamiccl_brain_v1(void) {
  return &kBrain;
}
