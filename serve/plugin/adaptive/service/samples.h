// Times of calls, from this rank's recorder to the leaders of its communicators.
#pragma once

#include <cstdint>

#include "adaptive/agreement/agreement.h"

namespace dynamiccl {

/// Have the times of the agreement's calls sent to its leader.
void watch_samples(Agreement* agreement) noexcept;
void unwatch_samples(Agreement* agreement) noexcept;

/// Send what has come since the last time, if that is due. True: something was sent. The outlet's
/// user is the agreement that sends.
bool send_samples(Agreement* agreements, const Outlet& outlet, std::uint64_t now_ns) noexcept;

/// Times that were not kept, since too many came at once.
std::uint64_t samples_lost() noexcept;

}  // namespace dynamiccl
