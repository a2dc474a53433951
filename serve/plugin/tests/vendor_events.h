// What the tests' vendor profiler has heard, read from outside by its symbol.
#pragma once

#include <atomic>

struct VendorEvents {
  std::atomic<int> version{0};
  std::atomic<int*> mask{nullptr};
  std::atomic<int> inits{0};
  std::atomic<int> finalized{0};
  std::atomic<long> starts{0};
  std::atomic<long> of_type[16] = {};  // by the number of the type's bit
  std::atomic<long> records{0};
  std::atomic<long> open{0};   // handles given out and not stopped
  std::atomic<long> twice{0};  // stopped again
  std::atomic<long> late{0};   // starts after finalize
};
