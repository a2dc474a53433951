// A directory for calls files, and what is in them.
#pragma once

#include <sys/stat.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "file.h"
#include "profiler/calls_file.h"

class CallsDirectory {
 public:
  CallsDirectory(const std::filesystem::path& parent, const std::string& name)
      : path_(parent / ("calls-" + name)) {
    std::filesystem::remove_all(path_);
    std::filesystem::create_directories(path_);
    chmod(path_.c_str(), 0700);
    setenv("DYNAMICCL_CALLS_DIR", path_.c_str(), 1);
  }
  ~CallsDirectory() { unsetenv("DYNAMICCL_CALLS_DIR"); }

  const std::filesystem::path& path() const { return path_; }

  std::vector<std::filesystem::path> files() const {
    std::vector<std::filesystem::path> found;
    for (const auto& entry : std::filesystem::directory_iterator(path_)) {
      found.push_back(entry.path());
    }
    std::sort(found.begin(), found.end());
    return found;
  }

  /// Every entry whose checksum is right, in the order of the files.
  std::vector<dynamiccl::CallsEntry> entries() const {
    std::vector<dynamiccl::CallsEntry> all;
    for (const auto& file : files()) {
      const std::string bytes = content(file);
      for (std::size_t at = dynamiccl::kCallsHeaderBytes;
           at + dynamiccl::kCallsEntryBytes <= bytes.size(); at += dynamiccl::kCallsEntryBytes) {
        dynamiccl::CallsEntry entry;
        std::memcpy(&entry, bytes.data() + at, sizeof entry);
        const auto* start = reinterpret_cast<const std::uint8_t*>(bytes.data() + at);
        const auto sum = static_cast<std::uint32_t>(
            dynamiccl::fnv1a(start, sizeof entry - sizeof entry.checksum));
        if (sum == entry.checksum) all.push_back(entry);
      }
    }
    return all;
  }

  /// The records, ordered by communicator, collective and sequence, and removed from the disk.
  std::vector<dynamiccl::CallRecord> take() {
    std::vector<dynamiccl::CallRecord> records;
    for (const dynamiccl::CallsEntry& entry : entries()) records.push_back(entry.record);
    std::stable_sort(records.begin(), records.end(), [](const auto& left, const auto& right) {
      if (left.comm_id != right.comm_id) return left.comm_id < right.comm_id;
      if (left.collective != right.collective) return left.collective < right.collective;
      return left.sequence < right.sequence;
    });
    for (const auto& file : files()) std::filesystem::remove(file);
    return records;
  }

  static std::string content(const std::filesystem::path& file) {
    std::ifstream stream(file, std::ios::binary);
    return {std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};
  }

 private:
  std::filesystem::path path_;
};
