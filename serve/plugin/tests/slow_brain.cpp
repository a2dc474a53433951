// Takes a second for whatever SLOW_BRAIN says (open, decide, close), and for all of it uses an
// object that the process makes at first use, as torch does. In libdynamiccl-torch.so's place.
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "brain/brain_abi.h"

namespace {

class Resource {
 public:
  ~Resource() {
    is_there_ = false;
    // The end of a process takes longer than this: long enough for whoever still uses it to crash.
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  void use() const {
    if (!is_there_) std::abort();
  }

 private:
  volatile bool is_there_ = true;
};

void work(const char* what) {
  static const Resource resource;
  const char* slow = std::getenv("SLOW_BRAIN");
  const bool is_slow = slow != nullptr && std::strcmp(slow, what) == 0;
  for (int i = 0; i < (is_slow ? 1000 : 1); ++i) {
    resource.use();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

int open_slow(const dynamiccl_brain_config*, void** brain, char*, std::size_t) {
  work("open");
  *brain = new int;
  return 0;
}

int decide_slow(void*, const dynamiccl_history* history, std::uint8_t* table, std::size_t,
                std::size_t* table_bytes, char*, std::size_t) {
  work("decide");
  if (history->table_bytes > 0) std::memcpy(table, history->table, history->table_bytes);
  *table_bytes = history->table_bytes;
  return 0;
}

void close_slow(void* brain) {
  work("close");
  delete static_cast<int*>(brain);
}

constexpr dynamiccl_brain kSlow = {DYNAMICCL_BRAIN_VERSION, "slow", open_slow, decide_slow,
                                   close_slow};

}  // namespace

extern "C" __attribute__((visibility("default"))) const dynamiccl_brain* dynamiccl_brain_v1(void) {
  return &kSlow;
}
