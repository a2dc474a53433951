// Writes table files for the tests, good and bad, from the format's description (serve/table.py).
#pragma once

#include <arpa/inet.h>
#include <dlfcn.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "crypto/sha256.h"
#include "identity/fingerprint.h"
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

/// An artifact directory for one test; sets the plugin's environment.
class ArtifactDirectory {
 public:
  ArtifactDirectory(const std::string& parent, const std::string& name)
      : root_(parent + "/artifact-" + name) {
    std::filesystem::remove_all(root_);  // of an earlier run
    std::filesystem::create_directories(root_ + "/tables/test");
    setenv("DYNAMICCL_ARTIFACT", root_.c_str(), 1);
    setenv("DYNAMICCL_COORDINATOR", "none", 1);
    setenv("DYNAMICCL_JOB_ID", (name + std::to_string(getpid())).c_str(), 1);
    for (const char* variable : {"DYNAMICCL_MODE", "DYNAMICCL_SYSTEM", "NCCL_ALGO", "NCCL_PROTO"}) {
      unsetenv(variable);
    }
    write_index();
  }

  /// Have the ranks meet over TCP, as those of several nodes do. Before the first of them comes.
  void use_coordinator() const {
    const std::string key = root_ + "/key";
    store(key, Bytes(32, 7));
    std::filesystem::permissions(key, std::filesystem::perms(0600));
    setenv("DYNAMICCL_KEY_FILE", key.c_str(), 1);
    sockaddr_in any = {};
    any.sin_family = AF_INET;
    any.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof any;
    const int probe = socket(AF_INET, SOCK_STREAM, 0);
    if (bind(probe, reinterpret_cast<sockaddr*>(&any), size) != 0) std::abort();
    getsockname(probe, reinterpret_cast<sockaddr*>(&any), &size);
    close(probe);
    const std::string where = "127.0.0.1:" + std::to_string(ntohs(any.sin_port));
    setenv("DYNAMICCL_COORDINATOR", where.c_str(), 1);
  }

  std::string path(int num_nodes, int num_ranks) const {
    return root_ + "/tables/test/nodes" + std::to_string(num_nodes) + "_ranks" +
           std::to_string(num_ranks) + ".dct";
  }

  /// A table, and an index that names it.
  void write(int num_nodes, int num_ranks, const Bytes& bytes) const {
    store(path(num_nodes, num_ranks), bytes);
    files_["table\ttest\t" + shape(num_nodes, num_ranks)] = hash_of(bytes);
    write_index();
  }

 private:
  static std::string shape(int num_nodes, int num_ranks) {
    return std::to_string(num_nodes) + "\t" + std::to_string(num_ranks);
  }

  static void store(const std::string& path, const Bytes& bytes) {
    std::ofstream file(path, std::ios::binary | std::ios::trunc);
    file.write(reinterpret_cast<const char*>(bytes.data()),
               static_cast<std::streamsize>(bytes.size()));
  }

  static std::string hash_of(const Bytes& bytes) {
    char text[dynamiccl::kHexBytes];
    dynamiccl::sha256_hex(bytes.data(), bytes.size(), text);
    return text;
  }

  void write_index() const {
    int version = 0;
    void* get = dlsym(RTLD_DEFAULT, "ncclGetVersion");
    if (get != nullptr) reinterpret_cast<int (*)(int*)>(get)(&version);
    char fingerprint[dynamiccl::kFingerprintBytes];
    if (!dynamiccl::take_fingerprint(version, fingerprint)) std::abort();
    std::string text = "dynamiccl-index\t1\nartifact\t" + std::string(64, '0') + "\n";
    const std::string machine = fingerprint;
    text += "system\ttest\t" + machine + "\n";
    // And with the NCCL of fake_nccl_library.cpp.
    text += "system\ttest\t" + machine.substr(0, machine.find(";nccl=")) + ";nccl=22809\n";
    for (const auto& [line, hash] : files_) text += line + "\t" + hash + "\n";
    const Bytes bytes(text.begin(), text.end());
    store(root_ + "/plugin.index", bytes);
  }

  std::string root_;
  mutable std::map<std::string, std::string> files_;  // line of the index -> hash
};
