// Counters of this rank's communicators as a text file that Prometheus' node exporter collects.
#pragma once

#include <cstdint>

#include "adaptive/agreement/agreement.h"
#include "identity/job.h"

namespace dynamiccl {

class Files;

class Metrics {
 public:
  void start(const Settings& settings, const Job& job) noexcept;
  /// Rewrite the file atomically if it is due.
  void write(const Agreement* agreements, std::uint64_t now_ns, Files* files) noexcept;

 private:
  char path_[4096] = "";
  std::uint64_t write_at_ns_ = 0;
};

}  // namespace dynamiccl
