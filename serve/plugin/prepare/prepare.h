// The parts of dynamiccl-prepare: how the job was started (start.cpp), and its arbiter
// (search.cpp).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "agree/seal.h"

namespace dynamiccl {

using Words = std::vector<std::string>;

enum class Hosts : std::uint8_t { kOne, kSeveral, kUnknown };

/// What launchers say of this process and its job.
struct Start {
  std::string name;      // of the job, equal on all its ranks
  std::uint64_t id = 0;  // hash of it and of the attempt, never 0
  Hosts hosts = Hosts::kUnknown;
  bool is_rank = false;   // rather than what starts the ranks
  bool is_first = false;  // whoever starts the arbiter
  std::string host;       // where that is, as the launcher calls it; empty: not known
};
Start find_start();

/// The value of an environment variable; empty where it is not set.
std::string value(const char* variable);

struct Endpoint {
  std::string host, port;
};

/// The address, as DYNAMICCL_ARBITER has it, that answers as this job's arbiter. All addresses of
/// all endpoints are tried side by side, again and again until the limit; with a limit of 0 once,
/// for a second. Empty: none. An accepted connection is no answer, since a service mesh accepts for
/// the dead; nor is a port that says nothing, or another job's arbiter.
std::string find_arbiter(std::uint64_t job, const Key& key, const std::vector<Endpoint>& endpoints,
                         std::uint64_t limit_ms);

/// Runs the arbiter's program, which puts itself into the background. False where it does not: it
/// has said why on descriptor 2, if it may.
bool start_arbiter(const std::string& program, const Words& words, bool may_speak);

}  // namespace dynamiccl
