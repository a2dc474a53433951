// What a plugin can notice of an NCCL release, 2.22 to 2.30: which structs it takes and in which
// order it calls them.
#pragma once

#include <string>
#include <vector>

struct Release {
  std::string name;
  int version;                         // as ncclGetVersion gives it
  std::vector<int> tuner_versions;     // in the order in which the symbols are looked up
  std::vector<int> profiler_versions;  // those from v4 on; older ones cannot be joined to a rank
  int num_algorithms;
  bool has_api_events;  // 2.28 on: GroupApi and CollApi around the rest
  bool has_allgatherv;  // 2.29 on: made of broadcasts of several roots in one group
};

/// The release called `name`, as "2.28"; throws std::invalid_argument with the choices.
const Release& release_named(const std::string& name);
