// An artifact as mode adaptive reads it: with an index of its tables, which knows this machine.
#pragma once

#include <dlfcn.h>

#include "crypto/sha256.h"
#include "identity/fingerprint.h"
#include "tests/table_file.h"

/// Of one table, for 8 ranks on one node; sets the plugin's environment.
class AdaptiveArtifact {
 public:
  AdaptiveArtifact(const std::string& parent, const std::string& name, const Bytes& table)
      : directory_(parent, name) {
    const std::string root = parent + "/artifact-" + name;
    setenv("DYNAMICCL_ARTIFACT", root.c_str(), 1);
    setenv("DYNAMICCL_COORDINATOR", "none", 1);
    setenv("DYNAMICCL_JOB_ID", (name + std::to_string(getpid())).c_str(), 1);
    for (const char* variable : {"DYNAMICCL_MODE", "DYNAMICCL_SYSTEM", "NCCL_ALGO", "NCCL_PROTO"}) {
      unsetenv(variable);
    }
    directory_.write(1, 8, table);
    int version = 0;
    void* get = dlsym(RTLD_DEFAULT, "ncclGetVersion");
    if (get != nullptr) reinterpret_cast<int (*)(int*)>(get)(&version);
    char machine[dynamiccl::kFingerprintBytes], hash[dynamiccl::kHexBytes];
    if (!dynamiccl::take_fingerprint(version, machine)) std::abort();
    dynamiccl::sha256_hex(table.data(), table.size(), hash);
    std::ofstream(root + "/plugin.index")
        << "dynamiccl-index\t1\nartifact\t" << std::string(64, '0') << "\nsystem\ttest\t" << machine
        << "\ntable\ttest\t1\t8\t" << hash << "\n";
  }

 private:
  ArtifactDirectory directory_;
};
