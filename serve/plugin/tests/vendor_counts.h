// What the tests' vendor plugin was asked, read from outside by its symbol.
#pragma once

#include <atomic>
#include <cstdint>

struct VendorCounts {
  std::atomic<int> inits{0};
  std::atomic<int> calls{0};
  std::atomic<int> finalized{0};
  std::atomic<int> version{0};
  std::atomic<int> support{-1};  // v2: 2 x CollNet + NVLS
  std::atomic<int> reg_buff{-1};
  std::atomic<std::uint64_t> comm_id{0};
  std::atomic<void*> domains{nullptr};
  std::atomic<void*> constants{nullptr};
};
