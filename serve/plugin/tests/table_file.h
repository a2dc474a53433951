// Writes table files for the tests, good and bad, from the format's description (serve/table.py).
#pragma once

#include <sys/utsname.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "table.h"

using Bytes = std::vector<std::uint8_t>;

inline void append(Bytes* bytes, std::uint64_t value, int size) {
  for (int i = 0; i < size; ++i) bytes->push_back(static_cast<std::uint8_t>(value >> (8 * i)));
}

inline Bytes sealed(Bytes bytes) {
  std::uint64_t digest = dynamiccl::kFnvOffset;
  for (const std::uint8_t byte : bytes) digest = (digest ^ byte) * dynamiccl::kFnvPrime;
  append(&bytes, digest, 8);
  return bytes;
}

/// A table in which every bin of one collective holds `entry`, and the others abstain.
inline Bytes table_of(int num_nodes, int num_ranks, dynamiccl::Entry entry,
                      int collective = dynamiccl::kAllReduce, int first_bin = 0,
                      int num_bins = dynamiccl::kMaxBins) {
  Bytes bytes(dynamiccl::kMagic, dynamiccl::kMagic + 8);
  for (const int value :
       {1, num_nodes, num_ranks, num_ranks / num_nodes, first_bin, num_bins, 5, 4, 8}) {
    append(&bytes, static_cast<std::uint32_t>(value), 4);
  }
  const dynamiccl::Entry abstain = {-1, -1, 0, 0, 0};
  for (int i = 0; i < dynamiccl::kNumCollectives * num_bins; ++i) {
    const dynamiccl::Entry& here = i / num_bins == collective ? entry : abstain;
    for (const int column : {here.algorithm, here.protocol, here.num_channels, here.act}) {
      append(&bytes, static_cast<std::uint8_t>(column), 1);
    }
    append(&bytes, static_cast<std::uint32_t>(here.chunk_bytes), 4);
  }
  return sealed(bytes);
}

/// Another run of a job: communicators of the same ids are others.
inline void begin_job() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch().count();
  char job[17];
  std::snprintf(job, sizeof job, "%08x%08x", static_cast<unsigned>(getpid()),
                static_cast<unsigned>(now));
  setenv("DYNAMICCL_JOB", job, 1);
}

/// Words that ranks have waited at in vain, which dynamiccl-run sweeps.
inline std::vector<std::string> words_of_job() {
  const std::string begin =
      "dynamiccl-" + std::to_string(geteuid()) + "-" + getenv("DYNAMICCL_JOB");
  std::vector<std::string> found;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    if (entry.path().filename().string().rfind(begin, 0) == 0) found.push_back(entry.path());
  }
  return found;
}
inline void sweep_job() {
  for (const std::string& word : words_of_job()) unlink(word.c_str());
}

/// An artifact's directory for one test, and what dynamiccl-run would have prepared for this job.
class ArtifactDirectory {
 public:
  ArtifactDirectory(const std::string& parent, const std::string& name)
      : root_(parent + "/artifact-" + name) {
    std::filesystem::remove_all(root_);  // of an earlier run
    std::filesystem::create_directories(root_ + "/tables/test");
    for (const char* variable : {"ARBITER", "DISABLE", "KEY", "KILL_FILE", "PROBLEM", "WORD"}) {
      unsetenv((std::string("DYNAMICCL_") + variable).c_str());
    }
    utsname here = {};
    uname(&here);
    setenv("DYNAMICCL_HOST", here.nodename, 1);
    setenv("DYNAMICCL_MACHINE", "gpu=Test*8;mig=0;nic=none*0", 1);
    // And with the NCCL of fake_nccl_library.cpp.
    setenv("DYNAMICCL_SYSTEMS", "23007=test 22809=test", 1);
    setenv("DYNAMICCL_TABLES", (root_ + "/tables").c_str(), 1);
    setenv("DYNAMICCL_INDEX", "0123456789abcdef", 1);
    begin_job();
  }
  ~ArtifactDirectory() { sweep_job(); }
  ArtifactDirectory(const ArtifactDirectory&) = delete;
  ArtifactDirectory& operator=(const ArtifactDirectory&) = delete;

  std::string path(int num_nodes, int num_ranks) const {
    return root_ + "/tables/test/nodes" + std::to_string(num_nodes) + "_ranks" +
           std::to_string(num_ranks) + ".dct";
  }

  void write(int num_nodes, int num_ranks, const Bytes& bytes) const {
    std::ofstream file(path(num_nodes, num_ranks), std::ios::binary | std::ios::trunc);
    file.write(reinterpret_cast<const char*>(bytes.data()),
               static_cast<std::streamsize>(bytes.size()));
  }

 private:
  std::string root_;
};
