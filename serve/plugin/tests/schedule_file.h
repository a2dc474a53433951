// Writes schedules for the tests and the benchmark, good and bad, from the format's description
// (dynamiccl/schedule.py), and reads the reports that come back.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "sweep/schedule.h"
#include "tests/table_file.h"

/// What to write; the default is two cycles over two sizes.
struct Plan {
  int num_nodes = 1;
  int num_ranks = 8;
  int collective = dynamiccl::kAllReduce;
  int halves = 2;
  int calls_per_half = 4;
  std::vector<dynamiccl::WarmupRun> warmup = {{1024, 3}, {2048, 3}};
  std::vector<std::uint64_t> sizes = {1024, 4096};
  std::vector<dynamiccl::Entry> configs = {{dynamiccl::kRing, dynamiccl::kLL128, 8, 1, 0},
                                           {-1, -1, 0, 0, 0},
                                           {dynamiccl::kTree, dynamiccl::kSimple, 4, 1, 0}};
  std::vector<std::uint16_t> blocks = {0, 1, 2, 0};

  int calls_per_block() const { return halves * calls_per_half; }
};

inline Bytes schedule_of(const Plan& plan) {
  Bytes bytes(dynamiccl::kScheduleMagic, dynamiccl::kScheduleMagic + 8);
  const auto num_sizes = static_cast<int>(plan.sizes.size());
  const int num_cycles = num_sizes == 0 ? 0 : static_cast<int>(plan.blocks.size()) / num_sizes;
  for (const int value : {1, plan.num_nodes, plan.num_ranks, plan.collective, plan.halves,
                          plan.calls_per_half, static_cast<int>(plan.warmup.size()), num_sizes,
                          num_cycles, static_cast<int>(plan.configs.size())}) {
    append(&bytes, static_cast<std::uint32_t>(value), 4);
  }
  for (const dynamiccl::WarmupRun& run : plan.warmup) {
    append(&bytes, run.size_bytes, 8);
    append(&bytes, run.num_calls, 8);
  }
  for (const std::uint64_t size : plan.sizes) append(&bytes, size, 8);
  for (const dynamiccl::Entry& config : plan.configs) {
    for (const int column : {config.algorithm, config.protocol, config.num_channels, config.act}) {
      append(&bytes, static_cast<std::uint8_t>(column), 1);
    }
    append(&bytes, static_cast<std::uint32_t>(config.chunk_bytes), 4);
  }
  for (const std::uint16_t block : plan.blocks) append(&bytes, block, 2);
  return sealed(bytes);
}

/// The last eight bytes of a file, as the launcher writes them into the environment.
inline std::string hash_of(const Bytes& bytes) {
  std::string hash;
  for (std::size_t i = 0; i < 8 && i < bytes.size(); ++i) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", bytes[bytes.size() - 1 - i]);
    hash += digits;
  }
  return hash;
}

/// A directory with a schedule and a report; sets the plugin's environment to sweep mode.
class SweepDirectory {
 public:
  SweepDirectory(const std::string& parent, const std::string& name)
      : root_(parent + "/sweep-" + name) {
    std::filesystem::remove_all(root_);  // of an earlier run
    std::filesystem::create_directories(root_);
    setenv("DYNAMICCL_MODE", "sweep", 1);
    setenv("DYNAMICCL_SCHEDULE", schedule().c_str(), 1);
    unsetenv("DYNAMICCL_SWEEP_REPORT");
  }

  std::string schedule() const { return root_ + "/schedule"; }
  std::string report() const { return root_ + "/report"; }

  /// Writes the file and says its hash; what a launcher does.
  void write(const Bytes& bytes) const {
    std::ofstream file(schedule(), std::ios::binary | std::ios::trunc);
    file.write(reinterpret_cast<const char*>(bytes.data()),
               static_cast<std::streamsize>(bytes.size()));
    setenv("DYNAMICCL_SCHEDULE_HASH", hash_of(bytes).c_str(), 1);
  }

  /// A new report for the communicators to come.
  void ask_for_report() const {
    std::filesystem::remove(report());
    setenv("DYNAMICCL_SWEEP_REPORT", report().c_str(), 1);
  }

  Bytes read_report() const {
    std::ifstream file(report(), std::ios::binary);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  }

 private:
  std::string root_;
};

/// A number of `size` bytes at `offset` of a report.
inline std::uint64_t report_number(const Bytes& report, std::size_t offset, std::size_t size) {
  std::uint64_t value = 0;
  for (std::size_t i = 0; i < size; ++i) value |= std::uint64_t{report.at(offset + i)} << (8 * i);
  return value;
}

inline std::uint64_t report_calls(const Bytes& report) { return report_number(report, 24, 8); }
inline std::uint64_t report_stop(const Bytes& report) { return report_number(report, 32, 8); }

inline std::uint64_t report_chunk(const Bytes& report, std::size_t block) {
  return report_number(report, dynamiccl::kReportHeaderBytes + 4 * block, 4);
}

inline int report_state(const Bytes& report, std::size_t num_blocks, std::size_t block) {
  return report.at(dynamiccl::kReportHeaderBytes + 4 * num_blocks + block);
}
