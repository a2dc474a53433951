// Times of calls, from this rank's recorder to the leaders of its communicators.
#pragma once

#include <cstdint>

#include "adaptive/agreement/agreement.h"

namespace dynamiccl {

/// Send the times of the agreement's calls to its leader.
void watch_samples(Agreement* agreement) noexcept;
void unwatch_samples(Agreement* agreement) noexcept;

/// Send new times if that is due. True: something was sent. `user` of the outlet is the agreement
/// that sends.
bool send_samples(Agreement* agreements, const Outlet& outlet, std::uint64_t now_ns) noexcept;

/// Number of times dropped because too many came at once.
std::uint64_t samples_lost() noexcept;

}  // namespace dynamiccl
