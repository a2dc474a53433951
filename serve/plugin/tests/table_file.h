// Table files for the tests, good and bad, and the environment of a job that has them.
#pragma once

#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
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
  append(&bytes, dynamiccl::fnv1a(bytes.data(), bytes.size()), 8);
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
  for (int i = 0; i < dynamiccl::kNumCollectives * num_bins; ++i) {
    const dynamiccl::Entry abstain = {-1, -1, 0, 0, 0};
    const dynamiccl::Entry& here = i / num_bins == collective ? entry : abstain;
    const auto* raw = reinterpret_cast<const std::uint8_t*>(&here);
    bytes.insert(bytes.end(), raw, raw + sizeof here);
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
  const std::string begin = "/dev/shm/dynamiccl-" + std::to_string(geteuid()) + "-";
  std::vector<std::string> found;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    const std::string path = entry.path();
    if (path.rfind(begin + getenv("DYNAMICCL_JOB"), 0) == 0) found.push_back(path);
  }
  return found;
}
inline void sweep_job() {
  for (const std::string& word : words_of_job()) unlink(word.c_str());
}

/// An artifact's directory for one test, and what dynamiccl-run would have prepared for this job.
struct ArtifactDirectory {
  ArtifactDirectory(const std::string& parent, const std::string& name)
      : root(parent + "/artifact-" + name) {
    std::filesystem::remove_all(root);  // of an earlier run
    std::filesystem::create_directories(root + "/tables/test");
    for (const char* variable : {"ARBITER", "DISABLE", "KEY", "KILL_FILE", "PROBLEM", "WORD"}) {
      unsetenv((std::string("DYNAMICCL_") + variable).c_str());
    }
    utsname here = {};
    uname(&here);
    setenv("DYNAMICCL_HOST", here.nodename, 1);
    setenv("DYNAMICCL_MACHINE", "gpu=Test*8;mig=0;nic=none*0", 1);
    setenv("DYNAMICCL_SYSTEMS", "23007=test 22809=test", 1);  // and with fake_nccl_library.cpp's
    setenv("DYNAMICCL_TABLES", (root + "/tables").c_str(), 1);
    setenv("DYNAMICCL_INDEX", "0123456789abcdef", 1);
    begin_job();
  }
  ~ArtifactDirectory() { sweep_job(); }

  std::string path(int num_nodes, int num_ranks) const {
    return root + "/tables/test/nodes" + std::to_string(num_nodes) + "_ranks" +
           std::to_string(num_ranks) + ".dct";
  }
  void write(int num_nodes, int num_ranks, const Bytes& bytes) const {
    std::ofstream file(path(num_nodes, num_ranks), std::ios::binary | std::ios::trunc);
    file.write(reinterpret_cast<const char*>(bytes.data()),
               static_cast<std::streamsize>(bytes.size()));
  }

  std::string root;
};
